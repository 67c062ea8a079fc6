# SPDX-License-Identifier: Apache-2.0
"""User input in error texts: short, one line, no control characters."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm_ros.echo import escaped, printable, quoted
from edgellm_ros.multimodal.audio.pcm import PcmFormat
from edgellm_ros.runtime.adapters.lora import check_name
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams

LONG = "\x1b[31mred\x07" + "x" * 1_000_000


@pytest.mark.parametrize("value", ["", "plain", "don't", 'say "no"', 3, 1.5, ("a", "b"), None, "Äpfel"])
def test_short_values_are_shown_as_python_writes_them(value):
    assert quoted(value) == repr(value)


def test_long_text_is_cut_and_its_length_is_given():
    assert quoted("x" * 201) == "'" + "x" * 200 + "'... (201 characters)"
    assert printable("x" * 201) == "x" * 200 + "... (201 characters)"
    assert printable("x" * 200) == "x" * 200


def test_control_characters_are_escaped():
    assert quoted("a\nb\x1b[0m\x9b\ud800") == r"'a\nb\x1b[0m\x9b\ud800'"
    assert printable("a\nb\x1b[0m\x9b\ud800") == r"a\nb\x1b[0m\x9b\ud800"
    assert escaped("a\r\n" * 100) == r"a\r\n" * 100


def test_an_array_is_shown_on_one_line():
    assert quoted(np.zeros((2, 2))).isprintable()


def test_an_integer_without_a_repr_is_named_by_its_type():
    assert quoted(10**5000) == "a value of type int"


@pytest.mark.parametrize(
    "make",
    [
        lambda: SamplingParams(stop=LONG),
        lambda: SamplingParams(stop=(LONG, "")),
        lambda: SamplingParams(seed=LONG),
        lambda: SamplingParams(temperature=LONG),
        lambda: LLMGenerationRequest(prompt=LONG.encode()),
        lambda: PcmFormat(LONG, 16000, 1),
        lambda: check_name(LONG),
    ],
)
def test_errors_about_a_request_are_short_and_have_no_control_characters(make):
    with pytest.raises(ValueError, match="31m") as caught:
        make()
    assert len(str(caught.value)) < 500
    assert str(caught.value).isprintable()
