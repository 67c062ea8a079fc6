# SPDX-License-Identifier: Apache-2.0
"""A CUDA GPU as a device: one stream, buffers, pinned staging, events, graphs.

Uses the driver through cuda-core and cuda-bindings in the primary context, which ONNX Runtime, TensorRT
and PyTorch share.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

try:
    from cuda.bindings import driver
    from cuda.core import Device as CudaCoreDevice
    from cuda.core import Stream
    from cuda.core.utils import StridedMemoryView
except ImportError as error:
    raise ImportError(f"{error}: pip install -r requirements-cuda.txt") from error

from edgellm_ros.engine.borrowing import Borrowed, is_contiguous
from edgellm_ros.engine.caller_stream import stream_handle
from edgellm_ros.engine.cuda.errors import check
from edgellm_ros.engine.cuda.graph import CudaGraph, check_replayable
from edgellm_ros.engine.cuda.staging import PinnedPool, UploadRing, release_with
from edgellm_ros.engine.errors import DeviceMemoryError, EngineError
from edgellm_ros.engine.tensor import Shape, Tensor, check_same


class CudaDevice:
    """The first GPU that CUDA_VISIBLE_DEVICES allows.

    `name`: "cuda" or "tensorrt", which selects the engine backend. `allow_plan_code`, `stream`: see
    `open_device`. EngineError if there is no usable GPU.
    """

    memory = "cuda"
    runs_beside = False  # all work is on one stream
    short_parts = False  # the time is that of reading the weights
    max_queued_steps = 1
    has_graphs = True
    capturing = False
    ordinal = 0  # number of the GPU in this process
    fill_kernel: Any = None  # CUfunction `fill(pointer, bytes)` for graphs, set by `load_cuda_kernels`

    def __init__(self, name: str = "cuda", allow_plan_code: bool = False, stream: object = None) -> None:
        self.name = name
        self.allow_plan_code = allow_plan_code
        try:
            gpu = CudaCoreDevice(self.ordinal)
            gpu.set_current()
        except Exception as error:  # cuda-core has its own classes for a missing driver and a missing GPU
            raise EngineError(f"device {name!r} is not available: no usable NVIDIA GPU ({error})") from None
        self.arch = f"sm_{gpu.arch}"
        self.description = f"{gpu.name} ({self.arch})"
        self.multiprocessors = gpu.properties.multiprocessor_count
        self.most_shared_memory = gpu.properties.max_shared_memory_per_block_optin  # bytes
        self._context = check(driver.cuCtxGetCurrent(), "while opening the GPU")
        self.stream = gpu.create_stream() if stream is None else self._stream_of_caller(stream)
        self._stream = driver.CUstream(int(self.stream.handle))
        self._current = threading.local()
        self._lock = threading.RLock()  # a graph must not record what another thread queues
        self._ring = UploadRing(self._context, self._stream, check)
        self._pool = PinnedPool(self._context, check)
        self._marks: list[TimedEvent] = []  # of marks that are gone

    def activate(self) -> None:
        """Make the GPU's context current in the calling thread."""
        if not getattr(self._current, "ready", False):
            check(driver.cuCtxSetCurrent(self._context), "in a new thread")
            self._current.ready = True

    def empty(self, shape: Shape, dtype: Any) -> Tensor:
        dtype = np.dtype(dtype)
        nbytes = max(1, prod(shape) * dtype.itemsize)
        with self._lock:
            self.activate()
            try:
                pointer = int(check(driver.cuMemAlloc(nbytes), "to allocate"))
            except DeviceMemoryError:
                raise DeviceMemoryError(self._no_memory(nbytes)) from None
        return Tensor(pointer, tuple(shape), dtype, _Allocation(self, pointer, nbytes))

    def zeros(self, shape: Shape, dtype: Any) -> Tensor:
        tensor = self.empty(shape, dtype)
        self.fill_zero(tensor)
        return tensor

    def adopt(self, array: np.ndarray) -> Tensor:
        tensor = self.empty(array.shape, array.dtype)
        self.upload(tensor, array)
        return tensor

    def upload(self, target: Tensor, source: np.ndarray) -> None:
        check_same(target, source)
        if not source.nbytes:
            return
        with self._lock:
            self.activate()
            self._ring.upload(target.pointer, np.ascontiguousarray(source))

    def download(self, source: Tensor) -> np.ndarray:
        array = np.empty(source.shape, source.dtype)
        with self._lock:
            self.activate()
            if array.nbytes:
                pointer = array.__array_interface__["data"][0]
                result = driver.cuMemcpyDtoHAsync(pointer, source.pointer, array.nbytes, self._stream)
                check(result, "in a copy to the host")
            check(driver.cuStreamSynchronize(self._stream), "in the work queued before")
        return array

    def copy(self, target: Tensor, source: Tensor) -> None:
        check_same(target, source)
        nbytes = source.size * source.dtype.itemsize
        if nbytes:
            with self._lock:
                self.activate()
                result = driver.cuMemcpyDtoDAsync(target.pointer, source.pointer, nbytes, self._stream)
                check(result, "in a copy on the device")

    def fill_zero(self, target: Tensor) -> None:
        nbytes = target.size * target.dtype.itemsize
        if nbytes:
            with self._lock:
                self.activate()
                check(driver.cuMemsetD8Async(target.pointer, 0, nbytes, self._stream), "filling with zeros")

    def copy_to_host(self, source: Tensor) -> CudaHostCopy:
        with self._lock:
            self.activate()
            slot = self._pool.take(source.size * source.dtype.itemsize)
            result = driver.cuMemcpyDtoHAsync(slot.pointer, source.pointer, slot.nbytes, self._stream)
            check(result, "in a copy to the host")
            check(driver.cuEventRecord(slot.event, self._stream), "recording an event")
        return CudaHostCopy(self, self._pool, slot, source.shape, source.dtype)

    def synchronize(self) -> None:
        with self._lock:
            self.activate()
            check(driver.cuStreamSynchronize(self._stream), "in the work queued before")

    def mark(self) -> CudaMark:
        with self._lock:
            self.activate()
            mark = CudaMark(self)
            check(driver.cuEventRecord(mark.event, self._stream), "recording an event")
        return mark

    def capture(self, record: Callable[[], None]) -> CudaGraph:
        with self._lock:
            self.activate()
            # relaxed: libraries may allocate memory while they are recorded
            mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            check(driver.cuStreamBeginCapture(self._stream, mode), "beginning a graph")
            self.capturing = True
            try:
                record()
            except BaseException:
                status, unfinished = driver.cuStreamEndCapture(self._stream)  # frees the stream
                if status == driver.CUresult.CUDA_SUCCESS:
                    driver.cuGraphDestroy(unfinished)
                raise
            finally:
                self.capturing = False
            graph = check(driver.cuStreamEndCapture(self._stream), "ending a graph")
            try:
                check_replayable(graph)
                return CudaGraph(self._stream, self._context, graph, self.activate, self.fill_kernel)
            finally:
                driver.cuGraphDestroy(graph)

    def memory_info(self) -> tuple[int, int]:
        """Return the GPU's free and total memory in bytes."""
        self.activate()
        status, free, total = driver.cuMemGetInfo()
        check((status,), "reading the memory in use")
        return free, total

    def let_wait(self, stream: int | None) -> None:
        """Let a stream wait for the work queued so far; see `Tensor.__dlpack__`.

        BufferError for stream 0.
        """
        if stream == 0:
            raise BufferError("stream 0 is ambiguous: 1 is the legacy default stream, 2 the calling thread's")
        other = 1 if stream is None else int(stream)
        if other in (-1, int(self._stream)):
            return
        with self._lock:
            self.activate()
            mark = CudaMark(self)
            check(driver.cuEventRecord(mark.event, self._stream), "recording an event")
            check(driver.cuStreamWaitEvent(driver.CUstream(other), mark.event, 0), "waiting for an event")

    def borrow(self, value: object) -> Tensor:
        """View an array that another library has on this GPU; see `borrowing.borrow`."""
        described = f"the array, a {type(value).__name__},"
        with self._lock:
            self.activate()
            try:
                view = StridedMemoryView.from_any_interface(value, stream_ptr=int(self._stream))
                shape, dtype, strides = tuple(view.shape), view.dtype, view.strides
            except (BufferError, NotImplementedError, TypeError, RuntimeError) as error:
                raise ValueError(f"cannot read {described} on the GPU: {error}") from None
        if view.device_id != self.ordinal:
            raise ValueError(f"{described} is on GPU {view.device_id}, and the device is GPU {self.ordinal}")
        if not is_contiguous(shape, strides):
            raise ValueError(
                f"{described} of shape {list(shape)} must be contiguous, got strides {list(strides)}"
            )
        return Tensor(int(view.ptr), shape, np.dtype(dtype), Borrowed(self, view))

    def _stream_of_caller(self, stream: object) -> Stream:
        """Wrap a stream of the caller, which is not destroyed."""
        handle = stream_handle(stream)
        context = check(driver.cuStreamGetCtx(driver.CUstream(handle)), "reading the given stream")
        if int(context) != int(self._context):
            raise EngineError(f"stream {handle:#x} is not of the primary CUDA context of {self.description}")
        self._stream_owner = stream  # an object of the caller lives as long as the device
        return Stream.from_handle(handle)

    def _no_memory(self, nbytes: int) -> str:
        free, total = self.memory_info()
        return f"out of GPU memory: {nbytes} bytes requested, {free} of {total} free on {self.description}"


class CudaHostCopy:
    """A copy to pinned memory that has been queued."""

    def __init__(
        self, device: CudaDevice, pool: PinnedPool, slot: Any, shape: Shape, dtype: np.dtype
    ) -> None:
        self._device, self._pool, self._slot = device, pool, slot
        self._shape, self._dtype = shape, dtype

    def wait(self) -> np.ndarray:
        self._device.activate()
        check(driver.cuEventSynchronize(self._slot.event), "in the work queued before")
        array = self._slot.read(self._shape, self._dtype)
        self._pool.give_back(self._slot)
        return array


class TimedEvent:
    """An event of the driver, which several marks use one after another."""

    def __init__(self, context: Any) -> None:
        self.handle = check(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DEFAULT), "to make an event")
        release_with(self, context, driver.cuEventDestroy, self.handle)


class CudaMark:
    """An event with the time at which the GPU reached it."""

    def __init__(self, device: CudaDevice) -> None:
        unused = device._marks
        event = unused.pop() if unused else TimedEvent(device._context)
        self.event, self._device = event.handle, device
        weakref.finalize(self, unused.append, event).atexit = False

    def seconds_since(self, earlier: CudaMark) -> float:
        self._device.activate()
        status, milliseconds = driver.cuEventElapsedTime(earlier.event, self.event)
        if status == driver.CUresult.CUDA_ERROR_NOT_READY:
            check(driver.cuEventSynchronize(self.event), "in the work queued before")
            status, milliseconds = driver.cuEventElapsedTime(earlier.event, self.event)
        check((status,), "in the work queued before")
        return float(milliseconds) / 1e3


class _Allocation:
    """Device memory, freed together with the last tensor that uses it."""

    def __init__(self, device: CudaDevice, pointer: int, nbytes: int) -> None:
        self.device = device
        self.nbytes = nbytes
        release_with(self, device._context, driver.cuMemFree, pointer)
