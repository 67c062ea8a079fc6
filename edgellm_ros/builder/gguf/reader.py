# SPDX-License-Identifier: Apache-2.0
"""Reads keys and tensors' places of a GGUF file.

Everything in a file is checked against its size before memory is taken for it. Source of the format:
ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from edgellm_ros.builder.gguf.blocks import NAMES_OF_TYPES, TYPES, BlockType
from edgellm_ros.echo import printable, quoted

SUFFIX = ".gguf"
VERSIONS = (2, 3)  # 1 has counts of 32 bits
MOST_STRING = 1 << 26  # bytes; chat templates and whole tokenizers are strings
MOST_DIMENSIONS, MOST_ALIGNMENT = 4, 1 << 16
LEAST_KEY, LEAST_TENSOR = 13, 25  # bytes of an entry
STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "B", 10: "Q", 11: "q", 12: "d"}
Entry = tuple[str, BlockType, tuple[int, ...], int]  # of a tensor: name, type, shape, offset
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class TensorPlace:
    """A tensor in a file."""

    file: Path
    name: str
    type: BlockType
    shape: tuple[int, ...]  # the last dimension is that of the blocks
    offset: int  # of the first byte in the file
    size: int  # bytes


@dataclass(frozen=True)
class GgufFile:
    """Keys and tensors of a file, or of all its parts."""

    path: Path  # the first part
    keys: dict[str, Any]
    tensors: dict[str, TensorPlace]


def read_gguf(path: Path) -> GgufFile:
    """Read a file, or all parts of a split one, of which `path` is the first.

    FileNotFoundError, or ValueError that names the file, for one that is damaged, cut short or not supported.
    """
    paths = parts(path)
    files = [_read(each) for each in paths]
    keys = files[0].keys
    tensors: dict[str, TensorPlace] = {}
    for file in files:
        for name, tensor in file.tensors.items():
            if name in tensors:
                raise ValueError(f"{file.path}: tensor {quoted(name)} is in {tensors[name].file.name} too")
            tensors[name] = tensor
    if len(paths) > 1 and keys.get("split.tensors.count", len(tensors)) != len(tensors):
        count = keys["split.tensors.count"]
        raise ValueError(f"{path}: split.tensors.count is {quoted(count)}, the parts have {len(tensors)}")
    return GgufFile(path, keys, tensors)


def parts(path: Path) -> list[Path]:
    """Return the files of a model, of which `path` is the first.

    ValueError for another part than the first. The files need not exist.
    """
    found = PART.fullmatch(path.name)
    if found is None:
        return [path]
    name, number, count = found[1], int(found[2]), int(found[3])
    if number != 1:
        raise ValueError(f"{path}: part {number} of {count}: give the first, {name}-00001-of-{found[3]}.gguf")
    return [path.with_name(f"{name}-{part:05d}-of-{found[3]}.gguf") for part in range(1, count + 1)]


def _read(path: Path) -> GgufFile:
    if not path.is_file():
        raise FileNotFoundError(f"{path} not found")
    size = path.stat().st_size
    if size < 24:
        raise ValueError(f"{path}: damaged or cut short: a file of {size} bytes")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Header(path, data, size).read()


class _Header:
    """A place in the header of a file, which moves on with each read."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self._path, self._data, self._size, self._at = path, data, size, 0

    def read(self) -> GgufFile:
        if self._take(4, "the format") != b"GGUF":
            raise ValueError(f"{self._path}: no GGUF file: it does not begin with 'GGUF'")
        version = self._number("I", "the version")
        if version not in VERSIONS:
            raise self._fail(f"version {version}, supported: {', '.join(map(str, VERSIONS))}")
        tensors = self._count("Q", "tensors", LEAST_TENSOR)
        keys: dict[str, Any] = {}
        for _ in range(self._count("Q", "keys", LEAST_KEY)):
            key = self._string("a key")
            if key in keys:
                raise self._fail(f"key {quoted(key)} twice")
            keys[key] = self._value(key)
        alignment = keys.get("general.alignment", 32)
        is_number = isinstance(alignment, int) and not isinstance(alignment, bool)
        if not is_number or not 1 <= alignment <= MOST_ALIGNMENT or alignment & (alignment - 1):
            raise self._fail(f"general.alignment {quoted(alignment)}: expected a power of two up to 65536")
        entries = [self._tensor(alignment) for _ in range(tensors)]
        start = -(-self._at // alignment) * alignment
        return GgufFile(self._path, keys, self._places(entries, start))

    def _places(self, entries: list[Entry], start: int) -> dict[str, TensorPlace]:
        found: dict[str, TensorPlace] = {}
        end = start
        for name, kind, shape, offset in sorted(entries, key=lambda entry: entry[3]):
            size = prod(shape) // kind.weights * kind.bytes
            if name in found:
                raise self._fail(f"tensor {quoted(name)} twice")
            if start + offset < end:
                raise self._fail(f"tensor {quoted(name)} overlaps another")
            end = start + offset + size
            if end > self._size:
                raise self._fail(f"tensor {quoted(name)} ends at byte {end}, the file has {self._size}")
            found[name] = TensorPlace(self._path, name, kind, shape, start + offset, size)
        return found

    def _tensor(self, alignment: int) -> Entry:
        name = self._string("a tensor's name")
        dimensions = self._number("I", "dimensions")
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise self._fail(f"tensor {quoted(name)} has {dimensions} dimensions, expected 1 to 4")
        shape = tuple(self._number("Q", "a dimension") for _ in range(dimensions))[::-1]
        if min(shape) < 1 or prod(shape) > 1 << 62:
            raise self._fail(f"tensor {quoted(name)} has the shape {list(shape)}")
        number, offset = self._number("I", "a type"), self._number("Q", "an offset")
        kind = TYPES.get(number)
        if kind is None:
            known = NAMES_OF_TYPES.get(number, f"of type {number}")
            supported = ", ".join(each.name for each in TYPES.values())
            raise ValueError(f"{self._path}: tensor {quoted(name)} is {known}; supported: {supported}")
        if shape[-1] % kind.weights:
            raise self._fail(f"tensor {quoted(name)}: rows of {shape[-1]} in blocks of {kind.weights}")
        if offset % alignment:
            raise self._fail(f"tensor {quoted(name)} is at {offset}, no multiple of {alignment}")
        return name, kind, shape, offset

    def _value(self, key: str) -> Any:
        kind = self._number("I", "a type")
        if kind == STRING:
            return self._string(f"key {quoted(key)}")
        if kind == ARRAY:
            return self._array(key)
        return self._scalar(key, kind)

    def _array(self, key: str) -> Any:
        kind = self._number("I", "a type")
        if kind == STRING:
            return [self._string(f"key {quoted(key)}") for _ in range(self._count("Q", key, 8))]
        form = self._form(key, kind)
        width = struct.calcsize(f"<{form}")
        count = self._count("Q", key, width)
        values = np.frombuffer(self._take(count * width, key), f"<{np.dtype(form).str[1:]}")
        return values.astype(bool).tolist() if kind == BOOL else values.tolist()

    def _scalar(self, key: str, kind: int) -> Any:
        value = self._number(self._form(key, kind), key)
        if kind != BOOL:
            return value
        if value not in (0, 1):
            raise self._fail(f"key {quoted(key)} is {value}, expected 0 or 1")
        return bool(value)

    def _form(self, key: str, kind: int) -> str:
        if kind not in SCALARS:
            raise self._fail(f"key {quoted(key)} has values of type {kind}")
        return SCALARS[kind]

    def _string(self, what: str) -> str:
        length = self._number("Q", what)
        if length > MOST_STRING:
            raise self._fail(f"{what} would have {length} bytes")
        data = self._take(length, what)
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise self._fail(f"{what} is no UTF-8: {printable(repr(data[:40]))}") from None

    def _count(self, form: str, what: str, least: int) -> int:
        """Read how many entries of at least `least` bytes follow."""
        count = self._number(form, what)
        if count > (self._size - self._at) // least:
            raise self._fail(f"{count} {what} would not fit into the file of {self._size} bytes")
        return count

    def _number(self, form: str, what: str) -> Any:
        return struct.unpack(f"<{form}", self._take(struct.calcsize(f"<{form}"), what))[0]

    def _take(self, count: int, what: str) -> bytes:
        start, self._at = self._at, self._at + count
        if self._at > self._size:
            raise self._fail(f"the file ends within {what}")
        return self._data[start : self._at]

    def _fail(self, reason: str) -> ValueError:
        return ValueError(f"{self._path}: damaged or cut short: {reason}")
