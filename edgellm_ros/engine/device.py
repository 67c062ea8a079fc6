# SPDX-License-Identifier: Apache-2.0
"""Devices: where buffers live and work is queued.

The runtime is written once against `Device`; it never asks which one it has. Every device has one stream:
copies, kernels and engines run on it in order, so only `download`, `HostCopy.wait` and `synchronize` wait,
and `upload` until there is room to stage what it was given.

A device's methods may be called from any thread. Engines and kernels are queued by one thread at a time: what
another queues while `capture` records would be recorded too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.tensor import Shape, Tensor, check_same

ALIGNMENT = 64  # bytes; one AVX-512 register, one cache line


class HostCopy(Protocol):
    """A copy to the host that has begun."""

    def wait(self) -> np.ndarray:
        """The contents, as soon as the work queued before the copy is done. May be called once."""
        ...


class DeviceGraph(Protocol):
    """Recorded work that is queued with one call."""

    def launch(self, stream: Any) -> None: ...


class Device(Protocol):
    """Memory and a stream.

    `name`: the string that `open_device` was given; `memory`: where buffers live, "cpu" or "cuda"; `arch`:
    such as "sm_90", "" on the CPU; `stream`: None on the CPU; `max_queued_steps`: how many decode steps may
    be queued before the tokens of the first are read; `capturing`: true while `capture` records.
    """

    name: str
    memory: str
    arch: str
    stream: Any
    max_queued_steps: int
    capturing: bool

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

    def copy_to_host(self, source: Tensor) -> HostCopy:
        """Begin to copy a tensor's contents to the host, behind the work queued so far."""
        ...

    def capture(self, record: Callable[[], None]) -> DeviceGraph | None:
        """The work that `record` queues, as a graph, not done yet; None if the device has no graphs.

        The caller has run `record` before, and keeps the memory alive that it uses. EngineError if something
        in it cannot be captured.
        """
        ...

    def memory_info(self) -> tuple[int, int]:
        """Bytes free and bytes in all; (0, 0) where the device does not say."""
        ...

    def synchronize(self) -> None:
        """Wait for all work queued so far. EngineError if some of it failed."""
        ...


class CpuHostCopy:
    """Contents that were copied already."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def wait(self) -> np.ndarray:
        return self._array


class CpuDevice:
    """The host: buffers are NumPy arrays, everything happens at once."""

    name = "cpu"
    memory = "cpu"
    arch = ""
    stream = None
    max_queued_steps = 0
    capturing = False

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
        check_same(target, source)
        np.copyto(target.array, source, casting="no")

    def download(self, source: Tensor) -> np.ndarray:
        return source.array.copy()

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.upload(target, source.array)

    def fill_zero(self, target: Tensor) -> None:
        target.array[...] = 0

    def copy_to_host(self, source: Tensor) -> CpuHostCopy:
        return CpuHostCopy(self.download(source))

    def capture(self, record: Callable[[], None]) -> None:
        return None

    def memory_info(self) -> tuple[int, int]:
        return 0, 0

    def synchronize(self) -> None:
        pass


def open_device(name: str) -> Device:
    """The device called "cpu", "cuda" or "tensorrt".

    ValueError for another name, EngineError if it is not available here.
    """
    if name == "cpu":
        return CpuDevice()
    if name in ("cuda", "tensorrt"):
        try:
            from edgellm_ros.engine.cuda_device import CudaDevice
        except ImportError as error:
            raise EngineError(f"device {name!r} is not available: {error}") from None
        return CudaDevice(name)
    raise ValueError(f"unknown device {name!r}, expected 'cpu', 'cuda' or 'tensorrt'")
