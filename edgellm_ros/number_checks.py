# SPDX-License-Identifier: Apache-2.0
"""Checks of numbers that users give."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

from edgellm_ros.echo import quoted


def check_number(name: str, value: Any, low: float, high: float, or_zero: bool = False) -> None:
    """Raise ValueError unless a value is a number in [low, high].

    The number must be whole if `low` is an int. or_zero: 0 is allowed too.
    """
    whole = isinstance(low, int)
    is_number = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
    if is_number and (low <= value <= high or (or_zero and value == 0)):
        return
    kind, ends = ("an integer", f"{low} to {high}") if whole else ("a number", f"{low:g} to {high:g}")
    raise ValueError(f"{name} must be {'0 or ' if or_zero else ''}{kind} from {ends}, got {quoted(value)}")
