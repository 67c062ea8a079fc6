# SPDX-License-Identifier: Apache-2.0
"""Tensor: a typed, shaped window on memory of one device.

Buffers are allocated once, at the largest size, and used through views of smaller shape. A tensor is always
contiguous (row-major), so an address and a shape say everything that an engine needs to bind it.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

Shape = tuple[int, ...]


class Tensor:
    """A contiguous window on memory of one device.

    `pointer` is the address of its first element, `array` the NumPy view of it, None off the host.

    `owner` is whatever keeps the memory alive; views share it. Made by a `Device`, or as a view of another
    tensor.
    """

    __slots__ = ("array", "dtype", "owner", "pointer", "shape")

    def __init__(self, pointer: int, shape: Shape, dtype: np.dtype, owner: Any, array: Any = None) -> None:
        self.pointer = pointer
        self.shape = shape
        self.dtype = dtype
        self.owner = owner
        self.array = array

    @classmethod
    def from_array(cls, array: np.ndarray) -> Tensor:
        """Host tensor on the memory of a contiguous NumPy array, not copied."""
        if not array.flags.c_contiguous:
            raise ValueError(f"array of shape {array.shape} is not contiguous")
        return cls(array.__array_interface__["data"][0], array.shape, array.dtype, array, array)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def view(self, *shape: int) -> Tensor:
        """The first elements of this tensor, seen with another shape. ValueError if it has fewer elements."""
        size = prod(shape)
        if size > self.size:
            raise ValueError(
                f"a view of shape {shape} has {size} elements, more than its tensor of shape {self.shape}"
            )
        array = None if self.array is None else self.array.reshape(-1)[:size].reshape(shape)
        return Tensor(self.pointer, shape, self.dtype, self.owner, array)

    def rows(self, start: int, stop: int) -> Tensor:
        """Elements start..stop-1 along the first axis. ValueError outside of it."""
        if not 0 <= start <= stop <= self.shape[0]:
            raise ValueError(f"rows {start}:{stop} are outside a tensor of shape {self.shape}")
        offset = start * prod(self.shape[1:]) * self.dtype.itemsize
        array = None if self.array is None else self.array[start:stop]
        return Tensor(self.pointer + offset, (stop - start, *self.shape[1:]), self.dtype, self.owner, array)

    def __repr__(self) -> str:
        return f"Tensor({self.dtype}, {list(self.shape)}, at {self.pointer:#x})"


def check_same(target: Tensor, source: np.ndarray | Tensor) -> None:
    """ValueError unless both have one shape and type."""
    if target.shape != source.shape or target.dtype != source.dtype:
        raise ValueError(
            f"cannot copy {source.dtype} {list(source.shape)} to {target.dtype} {list(target.shape)}"
        )
