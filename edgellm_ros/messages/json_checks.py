# SPDX-License-Identifier: Apache-2.0
"""Checks of JSON values, whose errors name the place."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from edgellm_ros.echo import quoted


def check_object(
    data: Any, where: str, known: Collection[str], required: Collection[str], also: str = ""
) -> None:
    """Check that a value is an object with known keys, among them all required ones.

    where: the place of the value. also: what else could be there. ValueError names place and key.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected {also}an object, got {described(data)}")
    for key in data:
        if key not in known:
            raise ValueError(f"{where}: unknown key {quoted(key)}; known are {', '.join(known)}")
    for key in required:
        if key not in data:
            raise ValueError(f"{where}: missing key {key!r}")


def described(value: Any) -> str:
    """Describe a JSON value in an error: its kind, or the value itself if it is short."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    return quoted(value)
