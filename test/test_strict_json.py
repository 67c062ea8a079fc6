# SPDX-License-Identifier: Apache-2.0
"""JSON that every parser reads, and JSON of files that can hold anything."""

from __future__ import annotations

import json
import math

import pytest

from edgellm_ros.strict_json import MAX_DEPTH, parse_json, strict_json


def test_half_a_surrogate_pair_can_be_encoded_and_is_read_back():
    content = {"f\udcfcr": ["\\\udcfc", "\\udcfc", "ü", "\U0001f916"]}
    text = strict_json(content)
    assert json.loads(text.encode("utf-8")) == content
    assert "ü" in text


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_does_not_have_are_refused(number):
    with pytest.raises(ValueError, match="not JSON compliant"):
        strict_json({"speed": [number]})


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 900, 100_000])
@pytest.mark.parametrize(("start", "end"), [("[", "]"), ('{"a": ', "}")])
def test_json_that_is_nested_too_deep_is_refused(depth, start, end):
    text = start * depth + "1" + end * depth
    with pytest.raises(ValueError, match="nested too deep: more than 100 objects and lists"):
        parse_json(text)


def test_json_of_the_greatest_depth_is_read():
    value = parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    for _ in range(MAX_DEPTH - 1):
        (value,) = value
    assert value == []


@pytest.mark.parametrize("text", ["", "{", b"\xff", b'{"a": "\xff"}', "9" * 5000, "\x00", "\ufeff{}"])
def test_what_is_not_json_is_refused_in_one_line(text):
    with pytest.raises(ValueError, match=r"^not valid JSON: .*$"):
        parse_json(text)
