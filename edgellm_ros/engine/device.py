# SPDX-License-Identifier: Apache-2.0
"""Devices: own buffers and queue work.

The runtime is written once against `Device` and never asks for the kind of device. Every device has one
stream, which a caller may give: copies, kernels and engines run in order. Only `download`, `HostCopy.wait`,
`Mark.seconds_since` and `synchronize` wait for the stream, and `upload` waits for room in the staging buffer.

A device's methods may be called from any thread. Engines and kernels are queued by one thread at a time: work
that another thread queues while `capture` records would be recorded too.
"""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from edgellm_ros.engine.caller_stream import stream_handle
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.tensor import Shape, Tensor, check_same

ALIGNMENT = 64  # bytes; one AVX-512 register, one cache line
LARGE = 1 << 20  # bytes


class HostCopy(Protocol):
    """A copy to the host that has been queued."""

    def wait(self) -> np.ndarray:
        """Wait for the copy and return the contents. May be called once."""
        ...


class Mark(Protocol):
    """A place in the order of a device's work."""

    def seconds_since(self, earlier: Any) -> float:
        """Return the seconds from an earlier mark of the device to this one.

        Waits until the device has reached this mark. EngineError if work before the mark failed.
        """
        ...


class DeviceGraph(Protocol):
    """Recorded work that is queued with one call."""

    def launch(self, stream: Any) -> None:
        """Queue the work."""
        ...


class Device(Protocol):
    """Memory and a stream."""

    name: str  # "cpu", "cuda" or "tensorrt", the argument of `open_device`
    memory: str  # kind of memory of the buffers: "cpu" or "cuda"
    arch: str  # such as "sm_90"; "" on the CPU
    description: str  # name and kind for messages, such as "NVIDIA H200 (sm_90)"
    stream: Any  # None on the CPU
    runs_beside: bool  # whether a thread may run an engine while another thread runs others
    short_parts: bool  # whether few tokens of a prompt take less time than a part of a long one
    max_queued_steps: int  # decode steps that may be queued after the one whose tokens the host waits for
    allow_plan_code: bool  # whether TensorRT may run the code in version-compatible plans
    has_graphs: bool  # whether `capture` can record
    capturing: bool  # true while `capture` records

    def activate(self) -> None:
        """Make the device usable by libraries in the calling thread."""
        ...

    def empty(self, shape: Shape, dtype: Any) -> Tensor:
        """Allocate a buffer with undefined contents."""
        ...

    def zeros(self, shape: Shape, dtype: Any) -> Tensor:
        """Allocate a buffer of zeros."""
        ...

    def adopt(self, array: np.ndarray) -> Tensor:
        """Return a tensor with the contents of a contiguous array.

        On a CPU it is the array itself, which must not be used for anything else; elsewhere a copy.
        """
        ...

    def upload(self, target: Tensor, source: np.ndarray) -> None:
        """Copy a host array of the same shape and type to the tensor.

        The caller may change `source` at once.
        """
        ...

    def download(self, source: Tensor) -> np.ndarray:
        """Wait for the work queued before, and return the contents as a new host array."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy a tensor to another one of the same shape and type, without overlap."""
        ...

    def fill_zero(self, target: Tensor) -> None: ...

    def copy_to_host(self, source: Tensor) -> HostCopy:
        """Queue a copy of a tensor's contents to the host."""
        ...

    def mark(self) -> Mark:
        """Queue a mark after the work queued so far."""
        ...

    def capture(self, record: Callable[[], None]) -> DeviceGraph | None:
        """Record the work that `record` queues as a graph, without running it.

        None if the device does not support graphs. The caller must have run `record` before, and must keep
        alive the memory that the work uses. EngineError if some of the work cannot be recorded.
        """
        ...

    def memory_info(self) -> tuple[int, int]:
        """Return free and total memory in bytes; (0, 0) if unknown."""
        ...

    def synchronize(self) -> None:
        """Wait for all work queued so far. EngineError if some of it failed."""
        ...


def on_device(device: Device, array: np.ndarray) -> Tensor:
    """Allocate a buffer with the contents of a host array."""
    tensor = device.empty(array.shape, array.dtype)
    device.upload(tensor, array)
    return tensor


class CpuHostCopy:
    """A copy that is already complete."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def wait(self) -> np.ndarray:
        return self._array


@dataclass(frozen=True)
class CpuMark:
    """A mark that is reached at once; `seconds`: of a clock."""

    seconds: float

    def seconds_since(self, earlier: CpuMark) -> float:
        return self.seconds - earlier.seconds


class CpuDevice:
    """The host: buffers are NumPy arrays, and all work is done immediately."""

    name = "cpu"
    memory = "cpu"
    arch = ""
    description = "CPU"
    stream = None
    runs_beside = short_parts = True
    max_queued_steps = 0
    allow_plan_code = False
    has_graphs = False
    capturing = False

    def activate(self) -> None:
        pass

    def empty(self, shape: Shape, dtype: Any) -> Tensor:
        return _aligned(np.empty, shape, np.dtype(dtype))

    def zeros(self, shape: Shape, dtype: Any) -> Tensor:
        """Allocate a buffer of zeros; a page of it takes memory when it is first written."""
        return _aligned(_zero_bytes, shape, np.dtype(dtype))

    def adopt(self, array: np.ndarray) -> Tensor:
        return Tensor.from_array(array)

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

    def mark(self) -> CpuMark:
        return CpuMark(time.perf_counter())

    def capture(self, record: Callable[[], None]) -> None:
        return None

    def memory_info(self) -> tuple[int, int]:
        return 0, 0

    def synchronize(self) -> None:
        pass


def _zero_bytes(nbytes: int, dtype: Any) -> np.ndarray:
    """Allocate zeros, large ones in pages of 4 KB.

    NumPy asks the system for pages of 2 MB. A KV cache has its heads side by side, and the first rows of each
    would fill all such pages.
    """
    if nbytes < LARGE or not hasattr(mmap, "MAP_ANONYMOUS"):
        return np.zeros(nbytes, dtype)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # kernels without large pages refuse the advice
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, dtype)


def _aligned(allocate: Callable[[int, Any], np.ndarray], shape: Shape, dtype: np.dtype) -> Tensor:
    """Allocate a host buffer that begins at a multiple of ALIGNMENT."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = allocate(nbytes + ALIGNMENT, np.uint8)
    offset = -raw.__array_interface__["data"][0] % ALIGNMENT
    return Tensor.from_array(raw[offset : offset + nbytes].view(dtype).reshape(shape))


def open_device(name: str, allow_plan_code: bool = False, stream: object = None) -> Device:
    """Open the device "cpu", "cuda" or "tensorrt".

    - allow_plan_code: load version-compatible plans, whose own code runs in this process
    - stream: the caller's CUDA stream for all work, in place of one that the device makes: a handle
      (`cudaStream_t`) or an object with `__cuda_stream__`. It belongs to the first GPU and is not destroyed
      with the device; while the device records a graph, the caller queues nothing on it

    ValueError for another name or stream, EngineError if the device is unavailable.
    """
    if name == "cpu":
        if stream is not None:
            raise ValueError("device 'cpu' has no streams: a stream is for 'cuda' and 'tensorrt'")
        return CpuDevice()
    if name in ("cuda", "tensorrt"):
        if stream is not None:
            stream_handle(stream)
        try:
            from edgellm_ros.engine.cuda.device import CudaDevice
        except ImportError as error:
            raise EngineError(f"device {name!r} is not available: {error}") from None
        return CudaDevice(name, allow_plan_code, stream)
    raise ValueError(f"unknown device {name!r}, expected 'cpu', 'cuda' or 'tensorrt'")
