# SPDX-License-Identifier: Apache-2.0
"""Reads JSON objects, and converts them strictly from and to frozen dataclasses.

A configuration file is written by one program and read by another, often much later. Therefore no value is
guessed: no key may be missing, no other key may be present, every value must have the declared type, and an
error names the key by its full path. A field may be one of several dataclasses if each has a field
`kind: Literal["..."]`, by which the object in the file chooses.
"""

from __future__ import annotations

import dataclasses
import os
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from edgellm_ros.echo import quoted
from edgellm_ros.strict_json import parse_json

T = TypeVar("T")
NULLABLE = "nullable"  # in the metadata of a field that may be null, though its type does not say so
MAX_FILE_NAME = 255  # bytes, of most file systems


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file.

    FileNotFoundError, or ValueError if the file is not valid JSON or holds no object.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} not found")
    try:
        data = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: expected an object, got {type(data).__name__}")
    return data


def is_file_name(value: object) -> bool:
    """Tell whether a value names a file beside the one that it is in."""
    usual = isinstance(value, str) and value not in ("", "..") and value.isprintable()
    usual = usual and Path(str(value)).name == value
    return usual and len(os.fsencode(str(value))) <= MAX_FILE_NAME


def to_dict(value: Any) -> Any:
    """Convert a dataclass to JSON's types.

    Values of fields may be dataclasses, tuples, numbers, strings and None.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_dict(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [to_dict(item) for item in value]
    return value


def from_dict(cls: type[T], data: Any, where: str = "") -> T:
    """Build the dataclass `cls` from a JSON object.

    `where` is the path shown in errors ("config.json: llm.rope"). ValueError for unknown keys, missing keys
    and wrong types; errors of `__post_init__` get the path too.
    """
    where = where or cls.__name__
    if not isinstance(data, Mapping):
        raise ValueError(f"{where}: expected an object, got {_describe(data)}")
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    unknown = sorted(str(key) for key in data if key not in names)
    missing = [name for name in names if name not in data]
    if unknown or missing:
        problems = [f"unknown key {quoted(key)}" for key in unknown]
        problems += [f"missing key {key!r}" for key in missing]
        raise ValueError(f"{where}: {', '.join(problems)}")
    nullable = {field.name for field in dataclasses.fields(cls) if field.metadata.get(NULLABLE)}  # type: ignore[arg-type]
    values = {
        name: None
        if name in nullable and data[name] is None
        else _convert(hints[name], data[name], f"{where}.{name}")
        for name in names
    }
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        if value is None and len(options) < len(typing.get_args(hint)):
            return None
        return _convert(_of_kind(options, value, where) if len(options) > 1 else options[0], value, where)
    if origin is typing.Literal:
        if value not in typing.get_args(hint):
            raise ValueError(f"{where}: expected {typing.get_args(hint)[0]!r}, got {_describe(value)}")
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{where}: expected a list, got {_describe(value)}")
        item_hint = typing.get_args(hint)[0]
        return tuple(_convert(item_hint, item, f"{where}[{i}]") for i, item in enumerate(value))
    if dataclasses.is_dataclass(hint):
        return from_dict(hint, value, where)  # type: ignore[arg-type]
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        expected = "null" if hint is type(None) else hint.__name__
        raise ValueError(f"{where}: expected {expected}, got {_describe(value)}")
    if hint is int and not -(2**63) <= value < 2**63:
        raise ValueError(f"{where}: expected an integer of 64 bits, got {value}")
    return value


def _of_kind(options: list[type], value: Any, where: str) -> type:
    """Choose among dataclasses by the object's `kind`.

    `kind` is a Literal field of each of them.
    """
    kinds = {typing.get_args(typing.get_type_hints(option)["kind"])[0]: option for option in options}
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: expected an object, got {_describe(value)}")
    if "kind" not in value:
        raise ValueError(f"{where}: missing key 'kind'")
    if not isinstance(value["kind"], str) or value["kind"] not in kinds:
        raise ValueError(f"{where}.kind: expected one of {', '.join(kinds)}, got {_describe(value['kind'])}")
    return kinds[value["kind"]]


def _describe(value: Any) -> str:
    return (
        f"{type(value).__name__} {quoted(value)}"
        if not isinstance(value, (Mapping, list))
        else type(value).__name__
    )
