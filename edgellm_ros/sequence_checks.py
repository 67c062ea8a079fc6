# SPDX-License-Identifier: Apache-2.0
"""Checks of sequences that users give."""

from __future__ import annotations

from typing import Any

from edgellm_ros.echo import quoted


def check_texts(name: str, values: Any, what: str = "non-empty strings") -> tuple[str, ...]:
    """Return the texts of a list or tuple as a tuple.

    ValueError unless all are non-empty strings, and for a mapping or a set: its order has no meaning.
    """
    if not isinstance(values, (list, tuple)) or not all(isinstance(text, str) and text for text in values):
        raise ValueError(f"{name} must be a sequence of {what}, got {quoted(values)}")
    return tuple(values)


def check_sequence(name: str, values: Any, what: str) -> tuple[Any, ...]:
    """Return the items of a list or tuple as a tuple.

    ValueError for anything else.
    """
    if not isinstance(values, (list, tuple)):
        raise ValueError(f"{name} must be a sequence of {what}, got {type(values).__name__}")
    return tuple(values)
