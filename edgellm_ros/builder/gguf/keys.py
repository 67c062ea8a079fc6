# SPDX-License-Identifier: Apache-2.0
"""Typed access to the keys of a GGUF file.

Errors name the file, the key, the value and what was expected.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edgellm_ros.builder.gguf.reader import GgufFile
from edgellm_ros.echo import quoted

LARGEST = (1 << 31) - 1
ARCHITECTURE = "general.architecture"


class Keys:
    """The keys of a file that begin with one prefix, such as `llama`.

    Names of keys are given without the prefix. ValueError for a key that is missing or of another type.
    """

    def __init__(self, file: GgufFile, prefix: str) -> None:
        self.file, self.prefix = file, prefix

    def has(self, key: str) -> bool:
        """Tell whether the file has a key."""
        return self._name(key) in self.file.keys

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Read an integer of 31 bits, at least `least`."""
        value = self._get(key, default)
        if not _is_integer(value, least):
            raise self.fail(key, f"expected an integer from {least}")
        return value

    def integers(self, key: str) -> list[int]:
        """Read integers from 0: a list, or one, which stands for all."""
        value = self._get(key, None)
        values = value if isinstance(value, list) else [value]
        if not values or not all(_is_integer(each, 0) for each in values):
            raise self.fail(key, "expected integers from 0")
        return values

    def of_layers(self, key: str, layers: int) -> list[int]:
        """Read an integer from 0 for each layer."""
        values = self.integers(key)
        if len(values) not in (1, layers):
            raise self.fail(key, f"expected an integer for each of {layers} layers, or one for all")
        return values * (layers // len(values))

    def flags(self, key: str, count: int) -> list[bool]:
        """Read a list of `count` truth values."""
        value = self._get(key, None)
        if not isinstance(value, list) or len(value) < count or not all(type(each) is bool for each in value):
            raise self.fail(key, f"expected {count} times true or false")
        return value[:count]

    def number(self, key: str, default: float | None = None) -> float:
        """Read a positive number of 32 bits as the shortest decimal that stands for it."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise self.fail(key, "expected a positive number")
        return float(str(np.float32(value)))

    def numbers(self, key: str, count: int) -> list[float]:
        """Read `count` numbers of 32 bits as the shortest decimals that stand for them."""
        value = self._get(key, None)
        if not isinstance(value, list) or len(value) != count or not all(map(_is_finite, value)):
            raise self.fail(key, f"expected {count} numbers")
        return [float(str(np.float32(each))) for each in value]

    def text(self, key: str, default: str | None = None) -> str:
        """Read a string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.fail(key, "expected a string")
        return value

    def fail(self, key: str, reason: str) -> ValueError:
        """Make the error to raise for the value of a key."""
        name = self._name(key)
        return ValueError(f"{self.file.path}: {name} {quoted(self.file.keys.get(name))}: {reason}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.file.keys.get(self._name(key), default)
        if value is None:
            raise ValueError(f"{self.file.path}: key {self._name(key)!r} is missing")
        return value

    def _name(self, key: str) -> str:
        return f"{self.prefix}.{key}"


def architecture(file: GgufFile) -> str:
    """Read the architecture of a file; ValueError if it names none."""
    return Keys(file, "general").text("architecture")


def _is_integer(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30
