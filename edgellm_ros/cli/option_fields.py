# SPDX-License-Identifier: Apache-2.0
"""Command-line options from the fields of a dataclass that are made by `option`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any

from edgellm_ros.cli.arguments import integer, number
from edgellm_ros.option import Option, options


def add_options(parser: argparse.ArgumentParser, of: type, groups: Mapping[str, str]) -> None:
    """Add an option for each such field of a dataclass; groups: title -> description."""
    owners: dict[str, Any] = {"": parser}
    owners |= {title: parser.add_argument_group(title, text) for title, text in groups.items()}
    exclusive: dict[str, Any] = {}
    for field, how in options(of):
        owner = owners[how.group]
        if how.exclusive:
            if how.group not in exclusive:
                exclusive[how.group] = owner.add_mutually_exclusive_group()
            owner = exclusive[how.group]
        owner.add_argument(_flag(field, how), **_keywords(field, how))


def read_options(args: argparse.Namespace, of: type) -> dict[str, Any]:
    """Return the values of the options that `add_options` has added, by field."""
    return {field.name: getattr(args, field.name) for field, _ in options(of)}


def _flag(field: dataclasses.Field, how: Option) -> str:
    return "--" + (how.flag or field.name.replace("_", "-"))


def _keywords(field: dataclasses.Field, how: Option) -> dict[str, Any]:
    """Return the keywords of `add_argument`; the default and `least` tell the kind."""
    common = {"dest": field.name, "help": how.help}
    if isinstance(field.default, bool):
        return {**common, "action": "store_false" if field.default else "store_true"}
    common["default"] = field.default
    if how.choices is not None:
        return {**common, "choices": how.choices, "type": type(how.choices[0])}
    common["metavar"] = how.metavar
    if how.repeated:
        return {**common, "action": "append", "default": []}
    if isinstance(field.default, tuple):
        return {**common, "type": _texts if how.least is None else _numbers(how)}
    return common if how.least is None else {**common, "type": _number(how)}


def _number(how: Option) -> Any:
    """Return a parser of a number; 0 or a value from `least` on is checked later."""
    if isinstance(how.least, int):
        return integer(how.least, how.most)
    return number(0 if how.or_zero else how.least, how.most)


def _numbers(how: Option) -> Any:
    """Return a parser of numbers, separated by commas, to a rising tuple."""
    one = _number(how)
    return lambda text: tuple(sorted({one(part) for part in text.split(",")}))


def _texts(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))
