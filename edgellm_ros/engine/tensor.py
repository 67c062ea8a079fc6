# SPDX-License-Identifier: Apache-2.0
"""Tensor: a typed view, with a shape, of memory on one device.

Buffers are allocated once, at the largest size, and used through views of smaller shape. A tensor is always
contiguous (row-major), so an engine needs only address, shape and type to bind it.

Other libraries take a tensor without a copy by DLPack (`torch.from_dlpack(tensor)`), by NumPy's array
interface and by the CUDA array interface.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from edgellm_ros.engine import dlpack

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
    - owner: the object that keeps the memory alive, shared by views; on a GPU its attribute `device` is the
      tensor's `CudaDevice`
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

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's type and number of the device. BufferError for another device."""
        if self.array is not None:
            return dlpack.CPU, 0
        if getattr(self._device, "memory", "") != "cuda":
            raise BufferError(f"{self!r} is neither on the host nor on a GPU")
        return dlpack.CUDA, self._device.ordinal

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a capsule for another library, which keeps the memory alive.

        stream: of the consumer, which waits for the work that was queued on this tensor: 1 or None = the
        legacy default stream, 2 = the calling thread's, -1 = it need not wait; None on the host. BufferError
        for another device, for `copy`, and for a type that DLPack lacks. Source: Python array API standard.
        """
        device = self.__dlpack_device__()
        if dl_device is not None and tuple(dl_device) != device:
            raise BufferError(f"{self!r} is on the device {device}, not on {tuple(dl_device)}")
        if copy:
            raise BufferError("a tensor gives its own memory, and makes no copy")
        if device[0] == dlpack.CUDA:
            self._device.let_wait(stream)
        elif stream is not None:
            raise BufferError(f"a tensor on the host has no stream, got {stream}")
        return dlpack.make_capsule(self, device, max_version)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """The tensor for NumPy; only on the host, in a type that NumPy has."""
        if self.array is None or self.dtype.isbuiltin != 1:
            raise AttributeError(f"{self!r} is no array of NumPy: its memory or its type is not NumPy's")
        return self.array.__array_interface__

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The tensor for libraries on a GPU, version 3; not in bf16 and FP8."""
        if self.array is not None or getattr(self._device, "memory", "") != "cuda":
            raise AttributeError(f"{self!r} is not on a GPU")
        if self.dtype.isbuiltin != 1:
            raise AttributeError(f"the CUDA array interface has no type {self.dtype}: use DLPack")
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.pointer if self.size else 0, False),
            "version": 3,
            "strides": None,
            "stream": int(self._device.stream.handle),
        }

    @property
    def _device(self) -> Any:
        return getattr(self.owner, "device", None)

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
