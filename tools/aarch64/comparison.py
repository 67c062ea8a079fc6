# SPDX-License-Identifier: Apache-2.0
"""Compare answers of two processors: equal tokens, numbers up to a tolerance."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUMBERS = ("actions", "paths", "logprobs")


class DifferenceError(Exception):
    """What the answers differ in."""


def compare(answers: list[Any], others: list[Any], tolerance: float) -> dict[str, float]:
    """Return the largest difference of each of NUMBERS that the answers have.

    answers, others: items of a file of `edgellm generate --requests --out`, on x86_64 and on aarch64.
    DifferenceError names the first value that differs.
    """
    if len(answers) != len(others):
        raise DifferenceError(f"{len(others)} answers on aarch64, {len(answers)} on x86_64")
    largest: dict[str, float] = {}
    for index, (answer, other) in enumerate(zip(answers, others, strict=True)):
        where = f"answer {index}"
        if "error" in answer or "error" in other:
            raise DifferenceError(
                f"{where}: {other.get('error')} on aarch64, {answer.get('error')} on x86_64"
            )
        tokens = zip_longest(answer["token_ids"], other["token_ids"])
        for place, (token, other_token) in enumerate(tokens):
            if token != other_token:
                raise DifferenceError(
                    f"{where}: token {place} is {other_token} on aarch64, {token} on x86_64"
                )
        for key in ("text", "finish_reason", "grammar_complete"):
            if answer.get(key) != other.get(key):
                found = f"{other.get(key)!r} on aarch64, {answer.get(key)!r} on x86_64"
                raise DifferenceError(f"{where}: {key} is {found}")
        for key in NUMBERS:
            difference = _largest_difference(answer.get(key), other.get(key))
            if not difference <= tolerance:  # a NaN too
                raise DifferenceError(f"{where}: {key} differ by {difference:.1e}, more than {tolerance:.0e}")
            if answer.get(key) is not None:
                largest[key] = max(difference, largest.get(key, 0.0))
    return largest


def _largest_difference(values: Any, others: Any) -> float:
    """Compare nested lists; infinity if one is missing or has another shape."""
    if values is None and others is None:
        return 0.0
    arrays = [_numbers(one) for one in (values, others)]
    if arrays[0].shape != arrays[1].shape:
        return float("inf")
    return float(np.abs(arrays[0] - arrays[1]).max(initial=0.0))


def _numbers(values: Any) -> NDArray[np.float64]:
    """Make an array of nested lists, also of pairs [token id, log-probability]."""
    return np.array([] if values is None else values, np.float64)
