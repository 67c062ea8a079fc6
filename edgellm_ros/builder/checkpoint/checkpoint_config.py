# SPDX-License-Identifier: Apache-2.0
"""Reads values of a checkpoint's JSON files.

Errors name the file, the key, the value and what was expected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from edgellm_ros.echo import printable, quoted
from edgellm_ros.engine_directory.schema import read_json

T = TypeVar("T")

MAX_SIZE = 2**31 - 1  # so that products of sizes fit in a dimension of an ONNX graph


class MixtureOfExpertsError(ValueError):
    """The model is a mixture of experts, which no family supports."""


class ConfigSection:
    """One object of a checkpoint's configuration.

    `where` is its path in errors ("config.json: text_config"). Checkpoints carry many keys that do not
    concern inference; keys that are not read are ignored.
    """

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = data
        self.where = where

    def fail(self, key: str, reason: str) -> ValueError:
        """Make the error to raise for the value of `key`."""
        return ValueError(f"{self.where}: {printable(key)} {quoted(self.data.get(key))}: {reason}")

    def mixture_of_experts(self, key: str, reason: str) -> MixtureOfExpertsError:
        """Make the error to raise if `key`'s value makes the model a mixture of experts."""
        return MixtureOfExpertsError(str(self.fail(key, f"a mixture of experts, only dense {reason}")))

    def has(self, key: str) -> bool:
        """Tell whether the key is present; null counts as missing."""
        return self.given(key)

    def given(self, key: str) -> bool:
        """Tell whether the key is present with a value other than null."""
        return self.data.get(key) is not None

    def section(self, key: str) -> ConfigSection:
        """Read the object at `key`."""
        value = self._get(key, Mapping, "an object")
        where = f"{self.where}.{key}" if ": " in self.where else f"{self.where}: {key}"
        return type(self)(value, where)

    def integer(self, key: str, default: int | None = None) -> int:
        """Read the integer at `key`, or return `default` if the key is missing."""
        if default is not None and not self.has(key):
            return default
        return self._get(key, int, "an integer")

    def size(self, key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        """Read an integer at `key`, 1 to `most`; `default` if the key is missing."""
        value = self.integer(key, default)
        if value < 1:
            raise self.fail(key, "expected at least 1")
        if value > most:
            raise self.fail(key, f"expected at most {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Read the number at `key` as a float, or return `default` if the key is missing."""
        if default is not None and not self.has(key):
            return default
        return self._finite(key, self._get(key, (int, float), "a number"))

    def text(self, key: str) -> str:
        """Read the string at `key`."""
        return self._get(key, str, "a string")

    def flag(self, key: str, default: bool) -> bool:
        """Read true or false at `key`, or return `default` if the key is missing."""
        return self._get(key, bool, "true or false") if self.has(key) else default

    def integers(self, key: str) -> tuple[int, ...]:
        """Read the list of integers at `key`."""
        values = self._get(key, list, "a list of integers")
        if not all(type(value) is int for value in values):
            raise self.fail(key, "expected a list of integers")
        return tuple(values)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Read the list of numbers at `key` as floats."""
        values = self._get(key, list, "a list of numbers")
        if not all(type(value) in (int, float) for value in values):
            raise self.fail(key, "expected a list of numbers")
        return tuple(self._finite(key, value) for value in values)

    def one_of(self, key: str, supported: Sequence[Any], default: Any = None) -> Any:
        """Read a value that must be among `supported`; a missing key means `default`."""
        value = self.data.get(key, default)
        if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in supported):
            raise self.fail(key, f"supported: {', '.join(map(str, supported))}")
        return value

    def require(self, keys: Iterable[str]) -> None:
        """Raise ValueError if one of the keys is missing or null.

        For keys whose defaults in the model code are another model's.
        """
        missing = next((key for key in keys if not self.has(key)), None)
        if missing is not None:
            raise ValueError(f"{self.where}: key {missing!r} is missing")

    def canonical(self, aliases: Mapping[str, str]) -> ConfigSection:
        """Return the section with the usual names of keys that may have another one.

        aliases: usual name -> other name. ValueError for two names with different values.
        """
        data = dict(self.data)
        for name, alias in aliases.items():
            if not self.has(alias):
                continue
            if self.has(name) and self.data[name] != self.data[alias]:
                raise self.fail(alias, f"expected {name}, which is {self.data[name]}")
            data[name] = data[alias]
        return type(self)(data, self.where)

    def nested(self) -> Iterator[ConfigSection]:
        """Yield this section and all objects in it, at any depth."""
        yield self
        for key, value in self.data.items():
            if isinstance(value, Mapping):
                yield from self.section(key).nested()

    def make(self, cls: Callable[..., T], **values: Any) -> T:
        """Make a dataclass of values read here.

        ValueErrors of the dataclass get the path of this section.
        """
        try:
            return cls(**values)
        except ValueError as error:
            raise ValueError(f"{self.where}: {error}") from None

    def _finite(self, key: str, value: float) -> float:
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self.fail(key, "expected finite numbers")
        return number

    def _get(self, key: str, kind: Any, expected: str) -> Any:
        if key not in self.data:
            raise ValueError(f"{self.where}: key {key!r} is missing")
        value = self.data[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.fail(key, f"expected {expected}")
        return value


class StrictSection(ConfigSection):
    """One object of a configuration in which null is a value, not a missing key.

    LeRobot reads its configurations so: a number that is null is an error, not the default.
    """

    def has(self, key: str) -> bool:
        return key in self.data


def read_section(path: Path) -> ConfigSection:
    """Read a JSON file of a checkpoint.

    FileNotFoundError, or ValueError if it holds no JSON object.
    """
    return ConfigSection(read_json(path), str(path))


def read_processor(checkpoint: Path, part: str) -> ConfigSection:
    """Read the section of a processor, such as `image_processor`.

    As in transformers 5, it is the object `part` of `processor_config.json`, or else the whole of
    `preprocessor_config.json`. FileNotFoundError if the checkpoint has neither.
    """
    path = checkpoint / "processor_config.json"
    if path.is_file():
        processor = read_section(path)
        if processor.has(part):
            return processor.section(part)
    return read_section(checkpoint / "preprocessor_config.json")
