# SPDX-License-Identifier: Apache-2.0
"""Fields of dataclasses that are options of the command line too."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from edgellm_ros.number_checks import check_number

KEY = "option"  # of the field's metadata


@dataclass(frozen=True)
class Option:
    """How the command line takes a field of a dataclass (cli/option_fields.py)."""

    help: str
    flag: str = ""  # without dashes; "" = the field's name
    metavar: str = "N"
    choices: Sequence[Any] | None = None
    # of a number, which is whole if this is an int, or of each number of a tuple; None = text
    least: float | None = None
    most: float | None = None  # of a number; None = no limit
    or_zero: bool = False  # of a number: may also be 0
    repeated: bool = False  # of a tuple: given once for each item; else its items are separated by commas
    exclusive: bool = False  # not together with the other exclusive fields of its group
    group: str = ""  # title of a group of `--help`

    def check(self, name: str, value: object) -> None:
        """Raise ValueError unless a value is in the range, if the field has one."""
        if self.least is not None and self.most is not None:
            check_number(name, value, self.least, self.most, self.or_zero)


def option(default: Any, text: str, kind: type[Option] = Option, **how: Any) -> Any:
    """Return a field with a default and a text for `--help`; how: as in `kind`."""
    return dataclasses.field(default=default, metadata={KEY: kind(text, **how)})


def options(of: type) -> Iterator[tuple[dataclasses.Field, Option]]:
    """Yield the fields of a dataclass that are made by `option`."""
    for field in dataclasses.fields(of):
        if KEY in field.metadata:
            yield field, field.metadata[KEY]
