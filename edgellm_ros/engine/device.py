# SPDX-License-Identifier: Apache-2.0
"""Devices: where buffers live and work is queued.

The runtime is written once against `Device`; it never asks which one it has. Every device has one stream:
copies, kernels and engines run on it in order, so only `download` waits.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.tensor import Shape, Tensor

ALIGNMENT = 64  # bytes; one AVX-512 register, one cache line


class Device(Protocol):
    """Memory and a stream. `name` is the string that `open_device` was given; `stream` is None on the CPU."""

    name: str
    stream: Any

    def empty(self, shape: Shape, dtype: Any) -> Tensor:
        """New buffer with any contents."""
        ...

    def zeros(self, shape: Shape, dtype: Any) -> Tensor:
        """New buffer of zeros."""
        ...

    def upload(self, target: Tensor, source: np.ndarray) -> None:
        """Copy a host array of the same shape and type into the tensor. `source` may be reused at once."""
        ...

    def download(self, source: Tensor) -> np.ndarray:
        """A new host array with the tensor's contents; waits for the work queued before."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy one tensor of this device into another of the same shape and type, not overlapping."""
        ...

    def fill_zero(self, target: Tensor) -> None: ...


class CpuDevice:
    """The host: buffers are NumPy arrays, everything happens at once."""

    name = "cpu"
    stream = None

    def empty(self, shape: Shape, dtype: Any) -> Tensor:
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        raw = np.empty(nbytes + ALIGNMENT, np.uint8)
        offset = -raw.__array_interface__["data"][0] % ALIGNMENT
        return Tensor.from_array(raw[offset : offset + nbytes].view(dtype).reshape(shape))

    def zeros(self, shape: Shape, dtype: Any) -> Tensor:
        tensor = self.empty(shape, dtype)
        self.fill_zero(tensor)
        return tensor

    def upload(self, target: Tensor, source: np.ndarray) -> None:
        _check_same(target, source)
        np.copyto(target.array, source, casting="no")

    def download(self, source: Tensor) -> np.ndarray:
        return source.array.copy()

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.upload(target, source.array)

    def fill_zero(self, target: Tensor) -> None:
        target.array[...] = 0


def _check_same(target: Tensor, source: np.ndarray) -> None:
    if target.shape != source.shape or target.dtype != source.dtype:
        raise ValueError(
            f"cannot copy {source.dtype} {list(source.shape)} to {target.dtype} {list(target.shape)}"
        )


def open_device(name: str) -> Device:
    """The device called "cpu", "cuda" or "tensorrt".

    ValueError for another name, EngineError if it is not available here.
    """
    if name == "cpu":
        return CpuDevice()
    if name in ("cuda", "tensorrt"):
        raise EngineError(
            f"device {name!r} is not available: this version of edgellm_ros executes engines on 'cpu' only"
        )
    raise ValueError(f"unknown device {name!r}, expected 'cpu', 'cuda' or 'tensorrt'")
