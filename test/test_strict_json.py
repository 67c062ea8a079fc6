# SPDX-License-Identifier: Apache-2.0
"""JSON that every parser reads and every file takes."""

from __future__ import annotations

import json
import math

import pytest

from edgellm_ros.strict_json import strict_json


def test_half_a_surrogate_pair_can_be_encoded_and_is_read_back():
    content = {"f\udcfcr": ["\\\udcfc", "\\udcfc", "ü", "\U0001f916"]}
    text = strict_json(content)
    assert json.loads(text.encode("utf-8")) == content
    assert "ü" in text


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_does_not_have_are_refused(number):
    with pytest.raises(ValueError, match="not JSON compliant"):
        strict_json({"speed": [number]})
