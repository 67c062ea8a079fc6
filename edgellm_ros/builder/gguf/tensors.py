# SPDX-License-Identifier: Apache-2.0
"""Tensors of transformers that are stored in GGUF files."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgellm_ros.builder.checkpoint.safetensors_file import DTYPES, StoredTensor
from edgellm_ros.builder.gguf.blocks import BlockType, Codes
from edgellm_ros.builder.gguf.changes import SAME, Change
from edgellm_ros.builder.gguf.reader import TensorPlace


@dataclass(frozen=True, eq=False)
class GgufTensor(StoredTensor):
    """A tensor of a GGUF file, whose values are floats."""

    type: BlockType
    stored_shape: tuple[int, ...]  # in the file
    change: Change

    @classmethod
    def of(cls, place: TensorPlace, name: str, change: Change = SAME) -> GgufTensor:
        """Make the tensor that has a name in transformers."""
        return cls(
            file=place.file,
            name=name,
            dtype="F32" if change.values is not None else place.type.dtype,
            shape=change.shape or place.shape,
            offset=place.offset,
            size=place.size,
            type=place.type,
            stored_shape=place.shape,
            change=change,
        )

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Read rows `start` to `stop`, all by default; blocks become fp32."""
        first, last, _ = slice(start, stop).indices(self.shape[0])
        if self.shape[0] == self.stored_shape[0]:
            return self._floats(first, last).reshape(-1, *self.shape[1:])
        return self._floats(0, self.stored_shape[0]).reshape(self.shape)[first:last]

    def codes(self) -> Codes:
        """Read all blocks of a matrix, whose columns may move in whole groups."""
        assert self.type.unpack is not None
        codes = self.type.unpack(self._blocks(0, self.stored_shape[0]))
        if not np.isfinite(codes.scales).all() or not (
            codes.minima is None or np.isfinite(codes.minima).all()
        ):
            raise ValueError(f"{self.file}: tensor {self.name!r} has scales that are not finite")
        columns = self.change.columns
        if columns is None:
            return codes
        groups = columns[:: self.type.group] // self.type.group
        minima = None if codes.minima is None else codes.minima[:, groups]
        return Codes(codes.values[:, columns], codes.scales[:, groups], minima)

    @property
    def has_whole_groups(self) -> bool:
        """Tell whether the columns of a group stay together."""
        columns, group = self.change.columns, self.type.group
        if columns is None:
            return True
        if len(columns) % group:
            return False
        runs = columns.reshape(-1, group)
        return bool((runs == runs[:, :1] + np.arange(group)).all() and not (runs[:, 0] % group).any())

    def _floats(self, first: int, last: int) -> np.ndarray:
        """Read rows of the file's shape, [rows,...]."""
        if self.type.unpack is None:
            dtype = DTYPES[self.type.dtype]
            values = self._rows(first, last).view(dtype).reshape(last - first, *self.stored_shape[1:])
        else:
            codes = self.type.unpack(self._blocks(first, last))
            values = codes.weights(self.type.centre).reshape(last - first, *self.stored_shape[1:])
        if self.change.columns is not None:
            values = values[:, self.change.columns]
        return values if self.change.values is None else self.change.values(values.astype(np.float32))

    def _blocks(self, first: int, last: int) -> np.ndarray:
        rows = self._rows(first, last)
        return rows.reshape(len(rows), -1, self.type.bytes)

    def _rows(self, first: int, last: int) -> np.ndarray:
        """Read rows as bytes [rows,bytes]."""
        order, count = self.change.rows, self.stored_shape[0]
        width = self.size // count
        start, count = (first, last - first) if order is None else (0, count)
        with self.file.open("rb") as file:
            file.seek(self.offset + start * width)
            data = np.fromfile(file, np.uint8, count * width)
        if data.size != count * width:
            raise ValueError(f"{self.file}: cut short while it was read: tensor {self.name!r} is incomplete")
        rows = data.reshape(count, width)
        return rows if order is None else rows[order[first:last]]


@dataclass(frozen=True, eq=False)
class JoinedTensor(StoredTensor):
    """A tensor of transformers that is several in the file, all of one shape."""

    parts: tuple[StoredTensor, ...]
    axis: int | None  # a new one, along which the parts are stacked; None = rows behind each other

    @classmethod
    def of(cls, name: str, parts: tuple[StoredTensor, ...], axis: int | None = None) -> JoinedTensor:
        """Join tensors; ValueError if their shapes differ."""
        first, count = parts[0], len(parts)
        for part in parts:
            if part.shape != first.shape:
                raise ValueError(
                    f"{part.file}: tensor {part.name!r} has the shape {list(part.shape)}, but "
                    f"{first.name!r} {list(first.shape)}"
                )
        if axis is None:
            shape = (count * first.shape[0], *first.shape[1:])
        else:
            shape = (*first.shape[:axis], count, *first.shape[axis:])
        same = all(part.dtype == first.dtype for part in parts)
        return cls(
            file=first.file,
            name=name,
            dtype=first.dtype if same else "F32",
            shape=shape,
            offset=first.offset,
            size=sum(part.size for part in parts),
            parts=parts,
            axis=axis,
        )

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Read rows `start` to `stop`, all by default."""
        values = [part.read().astype(DTYPES[self.dtype], copy=False) for part in self.parts]
        joined = np.concatenate(values) if self.axis is None else np.stack(values, self.axis)
        return joined[start:stop]
