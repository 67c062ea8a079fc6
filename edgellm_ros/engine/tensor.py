# SPDX-License-Identifier: Apache-2.0
"""Tensor: a typed view, with a shape, of memory on one device.

Buffers are allocated once, at the largest size, and used through views of smaller shape. A tensor is always
contiguous (row-major), so an engine needs only address, shape and type to bind it.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

Shape = tuple[int, ...]
KEPT_VIEWS = 64  # of a tensor; a view takes 4 us to make, and the same ones are made in every step


def bfloat16() -> np.dtype:
    """Return the NumPy type of bf16, which only engines in bf16 import."""
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def float8() -> np.dtype:
    """Return the NumPy type of FP8 (E4M3).

    Only engines with such a KV cache import it.
    """
    import ml_dtypes

    return np.dtype(ml_dtypes.float8_e4m3fn)


class Tensor:
    """A contiguous view of memory of one device.

    - pointer: address of the first element
    - owner: the object that keeps the memory alive, shared by views
    - array: NumPy view of the same memory; None for memory that is not on the host

    A tensor never changes, so equal views of it are one object.
    """

    __slots__ = ("_views", "array", "dtype", "owner", "pointer", "shape")

    def __init__(self, pointer: int, shape: Shape, dtype: np.dtype, owner: Any, array: Any = None) -> None:
        self.pointer = pointer
        self.shape = shape
        self.dtype = dtype
        self.owner = owner
        self.array = array
        self._views: dict[tuple[int | None, ...], Tensor] = {}  # by shape, or (first row, end, None)

    @classmethod
    def from_array(cls, array: np.ndarray) -> Tensor:
        """Make a host tensor on the memory of a contiguous NumPy array, without a copy."""
        if not array.flags.c_contiguous:
            raise ValueError(f"array of shape {array.shape} is not contiguous")
        return cls(array.__array_interface__["data"][0], array.shape, array.dtype, array, array)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def view(self, *shape: int) -> Tensor:
        """View the first elements of this tensor with another shape.

        ValueError if the shape has more elements than this tensor.
        """
        kept = self._views.get(shape)
        if kept is not None:
            return kept
        size = prod(shape)
        if size > self.size:
            raise ValueError(
                f"a view of shape {shape} has {size} elements, more than its tensor of shape {self.shape}"
            )
        array = None if self.array is None else self.array.reshape(-1)[:size].reshape(shape)
        return self._keep(shape, Tensor(self.pointer, shape, self.dtype, self.owner, array))

    def rows(self, start: int, stop: int) -> Tensor:
        """View elements start..stop-1 along the first axis. ValueError out of range."""
        kept = self._views.get((start, stop, None))
        if kept is not None:
            return kept
        if not 0 <= start <= stop <= self.shape[0]:
            raise ValueError(f"rows {start}:{stop} are outside a tensor of shape {self.shape}")
        offset = start * prod(self.shape[1:]) * self.dtype.itemsize
        array = None if self.array is None else self.array[start:stop]
        view = Tensor(self.pointer + offset, (stop - start, *self.shape[1:]), self.dtype, self.owner, array)
        return self._keep((start, stop, None), view)

    def _keep(self, key: tuple[int | None, ...], view: Tensor) -> Tensor:
        if len(self._views) >= KEPT_VIEWS:
            self._views.clear()
        self._views[key] = view
        return view

    def __repr__(self) -> str:
        return f"Tensor({self.dtype}, {list(self.shape)}, at {self.pointer:#x})"


def check_same(target: Tensor, source: np.ndarray | Tensor) -> None:
    """Raise ValueError unless both have the same shape and type."""
    if target.shape != source.shape or target.dtype != source.dtype:
        raise ValueError(
            f"cannot copy {source.dtype} {list(source.shape)} to {target.dtype} {list(target.shape)}"
        )
