# SPDX-License-Identifier: Apache-2.0
"""Reads and writes safetensors files in blocks of rows.

A block is read with an ordinary read, not through a memory map: pages of a map count as memory of the process
while the map is open, so that reading a checkpoint through maps seems to need as much memory as the
checkpoint has bytes.

Format: github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from edgellm_ros.strict_json import parse_json

FLOATS = {
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
}
INTEGERS: dict[str, np.dtype[Any]] = {"I32": np.dtype(np.int32), "I64": np.dtype(np.int64)}
QUANTIZED: dict[str, np.dtype[Any]] = {
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}
DTYPES: dict[str, np.dtype[Any]] = {**FLOATS, **INTEGERS, **QUANTIZED}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER = 100_000_000  # bytes, as in the safetensors library
LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file, not read yet."""

    file: Path
    name: str
    dtype: str  # as in the file: "F16", "BF16", "F32", "I8", "F8_E4M3", ...
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file
    size: int  # bytes

    @property
    def rows(self) -> int:
        """Return the size of the first dimension; 0 for a scalar."""
        return self.shape[0] if self.shape else 0

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Read rows `start` to `stop` of a tensor in its stored type, one of DTYPES.

        By default these are all rows.
        """
        dtype = DTYPES[self.dtype]
        shape = self.shape
        if shape:
            first, last, _ = slice(start, stop).indices(shape[0])
            shape = (max(0, last - first), *shape[1:])
            start = first * prod(self.shape[1:])
        with self.file.open("rb") as file:
            file.seek(self.offset + start * dtype.itemsize)
            data = np.fromfile(file, np.uint8, prod(shape) * dtype.itemsize)
        if data.size != prod(shape) * dtype.itemsize:
            raise ValueError(f"{self.file}: cut short while it was read: tensor {self.name!r} is incomplete")
        return data.view(dtype).reshape(shape)


@dataclass(frozen=True, eq=False)
class MultipliedTensor(StoredTensor):
    """The product of factors with a tensor of floats, computed in fp32 when read."""

    source: StoredTensor
    factors: np.ndarray  # of the tensor's shape, or broadcast to it
    shift: float  # added to the tensor before the product, subtracted from the product

    @classmethod
    def of(cls, source: StoredTensor, factors: np.ndarray, shift: float = 0.0) -> MultipliedTensor:
        """Make the product of a tensor."""
        factors = factors.reshape((1,) * (len(source.shape) - factors.ndim) + factors.shape)
        np.broadcast_shapes(factors.shape, source.shape)
        return cls(
            file=source.file,
            name=source.name,
            dtype="F32",
            shape=source.shape,
            offset=source.offset,
            size=source.size,
            source=source,
            factors=factors,
            shift=shift,
        )

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Read rows `start` to `stop` (all rows by default) of the product, fp32."""
        values = self.source.read(start, stop).astype(np.float32)
        factors = self.factors if len(self.factors) == 1 else self.factors[start:stop]
        return (values + np.float32(self.shift)) * factors.astype(np.float32) - np.float32(self.shift)


@dataclass(frozen=True, eq=False)
class AdaptedTensor(StoredTensor):
    """The sum of a matrix of floats and a product of two, in fp32 when read."""

    source: StoredTensor
    left: np.ndarray  # [rows, r] float32
    right: np.ndarray  # [r, columns] float32

    @classmethod
    def of(cls, source: StoredTensor, left: np.ndarray, right: np.ndarray) -> AdaptedTensor:
        """Make the sum of `source` and `left @ right`."""
        stored = {field.name: getattr(source, field.name) for field in fields(StoredTensor)}
        return cls(**{**stored, "dtype": "F32"}, source=source, left=left, right=right)

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Read rows `start` to `stop` (all rows by default) of the sum, fp32."""
        return self.source.read(start, stop).astype(np.float32) + self.left[start:stop] @ self.right


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Read names, types and shapes of the tensors of a file.

    FileNotFoundError, or ValueError for a file that is damaged or cut short.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} not found")
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) == 8 and (start + file.read(len(LFS_POINTER) - 8)) == LFS_POINTER:
            raise ValueError(f"{path}: a pointer of Git LFS, not the file: fetch it with `git lfs pull`")
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER, size - 8):
            raise ValueError(
                f"{path}: damaged or cut short: its header would have {length} bytes, the file has {size}"
            )
        file.seek(8)
        text = file.read(length)
    try:
        header = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path}: damaged or cut short: no header of a safetensors file: {error}") from None
    try:
        tensors = [
            _entry(path, name, entry, 8 + length) for name, entry in header.items() if name != "__metadata__"
        ]
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        raise ValueError(f"{path}: damaged or cut short: no header of a safetensors file") from None
    end = 8 + length
    for tensor, stop in sorted(tensors, key=lambda pair: (pair[0].offset, pair[1])):
        if tensor.offset != end:
            raise ValueError(f"{path}: damaged: tensor {tensor.name!r} overlaps another or leaves a gap")
        end = stop
    if end != size:
        raise ValueError(
            f"{path}: damaged or cut short: by its header the file has {end} bytes, but it has {size}"
        )
    return {tensor.name: tensor for tensor, _ in tensors}


def _entry(path: Path, name: str, entry: Any, data: int) -> tuple[StoredTensor, int]:
    """Convert one entry of the header; return the end of its bytes too."""
    dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if not isinstance(dtype, str) or any(type(number) is not int for number in (*shape, start, stop)):
        raise TypeError
    if min((*shape, start, stop - start)) < 0:
        raise ValueError
    if dtype in DTYPES and stop - start != prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError
    return StoredTensor(path, name, dtype, shape, data + start, stop - start), data + stop


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file to write, with one tensor."""

    name: str  # of the tensor
    dtype: np.dtype
    shape: tuple[int, ...]
    blocks: Callable[[], Iterable[np.ndarray]]  # the tensor's rows in this type, in blocks

    @property
    def size(self) -> int:
        """Return the bytes of the file."""
        return len(self._header()) + self._data_size()

    def write(self, path: Path) -> None:
        """Write the file, block by block."""
        with path.open("wb") as file:
            file.write(self._header())
            for block in self.blocks():
                file.write(as_bytes(block))

    def _data_size(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def _header(self) -> bytes:
        entry = {"dtype": NAMES[self.dtype], "shape": self.shape, "data_offsets": [0, self._data_size()]}
        text = json.dumps({self.name: entry}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text


def as_bytes(array: np.ndarray) -> memoryview:
    """Return the bytes of a row-major array without a copy."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
