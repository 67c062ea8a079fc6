# SPDX-License-Identifier: Apache-2.0
"""Fields: the keys of a JSON object, taken one by one and checked."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from edgellm_ros.echo import printable, quoted
from edgellm_ros.messages.json_checks import described
from edgellm_ros.number_checks import check_number
from edgellm_ros.serving.openai.errors import ApiError


class Fields:
    """The keys of an object; null is the same as no key.

    where: the object's place, "" for the body. ApiError 400 names the field.
    """

    def __init__(self, data: Any, where: str = "") -> None:
        if not isinstance(data, dict):
            raise refused(where or "body", f"expected an object, got {described(data)}")
        self._data = data
        self._where = where
        self._taken: set[str] = set()

    def place(self, name: str) -> str:
        """Return the place of a field."""
        return f"{self._where}.{name}" if self._where else name

    def refuse(self, name: str, problem: str) -> ApiError:
        """Return the error of a field."""
        return refused(self.place(name), problem)

    def take(self, name: str) -> Any:
        """Return a value of any type; None if it is absent."""
        self._taken.add(name)
        return self._data.get(name)

    def need(self, name: str) -> Any:
        """Return a value that must be there."""
        value = self.take(name)
        if value is None:
            raise self.refuse(name, "is missing")
        return value

    def text(self, name: str, default: str = "") -> str:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.refuse(name, f"expected a string, got {described(value)}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(name, f"expected true or false, got {described(value)}")
        return value

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> Any:
        return self._number(name, low, high, default)

    def number(self, name: str, low: float, high: float, default: float | None = None) -> Any:
        return self._number(name, float(low), float(high), default)

    def choice(self, name: str, choices: Collection[str], default: str | None = None) -> Any:
        """Return one of several texts."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, str) or value not in choices:
            raise self.refuse(name, f"expected one of {', '.join(choices)}, got {described(value)}")
        return value

    def listed(self, name: str, most: int) -> list[Any] | None:
        """Return a list of at most `most` items; None if it is absent."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.refuse(name, f"expected a list, got {described(value)}")
        if len(value) > most:
            raise self.refuse(name, f"expected at most {most} items, got {len(value)}")
        return value

    def neutral(self, name: str, *values: Any) -> None:
        """Take a field that this server does not support: only values without effect."""
        value = self.take(name)
        if value is not None and not any(value == each and type(value) is type(each) for each in values):
            known = " or ".join(quoted(each) for each in values)
            raise self.refuse(name, f"is not supported: expected no value or {known}, got {described(value)}")

    def done(self, ignored: Collection[str] = ()) -> None:
        """Refuse fields that were not taken; `ignored` have no effect on an answer."""
        for name in self._data:
            if name not in self._taken and name not in ignored:
                place = self.place(printable(name[:100])) if name else self._where or "body"
                raise refused(place, f"unknown field {quoted(name)}")

    def _number(self, name: str, low: float, high: float, default: float | None) -> Any:
        value = self.take(name)
        if value is None:
            return default
        try:
            check_number(self.place(name), value, low, high)
        except ValueError as error:
            raise ApiError(400, str(error), self.place(name)) from None
        return value


def refused(place: str, problem: str) -> ApiError:
    """Return the error of a place of a request."""
    return ApiError(400, f"{place}: {problem}", place)
