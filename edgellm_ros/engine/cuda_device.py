# SPDX-License-Identifier: Apache-2.0
"""A CUDA GPU as a device: one stream, buffers, pinned staging, events, graphs.

Uses the driver through cuda-core and cuda-bindings in the primary context, which ONNX Runtime, TensorRT
and PyTorch share.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

try:
    from cuda.bindings import driver
    from cuda.core import Device as CudaCoreDevice
except ImportError as error:
    raise ImportError(f"{error}: pip install -r requirements-cuda.txt") from error

from edgellm_ros.engine.cuda_staging import PinnedPool, UploadRing, release_with
from edgellm_ros.engine.errors import DeviceLostError, DeviceMemoryError, EngineError
from edgellm_ros.engine.tensor import Shape, Tensor, check_same

_Result = driver.CUresult
# After one of these results every later call in this process fails.
LOST = {
    _Result.CUDA_ERROR_ECC_UNCORRECTABLE,
    _Result.CUDA_ERROR_ILLEGAL_ADDRESS,
    _Result.CUDA_ERROR_LAUNCH_TIMEOUT,
    _Result.CUDA_ERROR_CONTEXT_IS_DESTROYED,
    _Result.CUDA_ERROR_ASSERT,
    _Result.CUDA_ERROR_HARDWARE_STACK_ERROR,
    _Result.CUDA_ERROR_ILLEGAL_INSTRUCTION,
    _Result.CUDA_ERROR_MISALIGNED_ADDRESS,
    _Result.CUDA_ERROR_INVALID_ADDRESS_SPACE,
    _Result.CUDA_ERROR_INVALID_PC,
    _Result.CUDA_ERROR_LAUNCH_FAILED,
    _Result.CUDA_ERROR_DEINITIALIZED,
    _Result.CUDA_ERROR_DEVICE_UNAVAILABLE,
}


def check(result: tuple[Any, ...], doing: str) -> Any:
    """Return the value of a driver call. EngineError names the failed operation.

    `doing`: the operation, as in "CUDA_ERROR_... `doing`". DeviceMemoryError, DeviceLostError.
    """
    status, *values = result
    if status == _Result.CUDA_SUCCESS:
        return values[0] if values else None
    name = status.name
    if status == _Result.CUDA_ERROR_OUT_OF_MEMORY:
        raise DeviceMemoryError(f"out of GPU memory {doing}")
    if status in LOST:
        raise DeviceLostError(
            f"the GPU stopped working for this process ({name} {doing}): only a new process can use it again"
        )
    raise EngineError(f"CUDA: {name} {doing}")


class CudaDevice:
    """The first GPU that CUDA_VISIBLE_DEVICES allows.

    `name`: "cuda" or "tensorrt", which selects the engine backend. EngineError if there is no usable GPU.
    """

    memory = "cuda"
    max_queued_steps = 1
    capturing = False

    def __init__(self, name: str = "cuda") -> None:
        self.name = name
        try:
            gpu = CudaCoreDevice(0)
            gpu.set_current()
        except Exception as error:  # cuda-core has its own classes for a missing driver and a missing GPU
            raise EngineError(f"device {name!r} is not available: no usable NVIDIA GPU ({error})") from None
        self.description = gpu.name
        self.arch = f"sm_{gpu.arch}"
        self.multiprocessors = gpu.properties.multiprocessor_count
        self.stream = gpu.create_stream()
        self._stream = driver.CUstream(int(self.stream.handle))
        self._context = check(driver.cuCtxGetCurrent(), "while it was opened")
        self._current = threading.local()
        self._lock = threading.RLock()  # a graph must not record what another thread queues
        self._ring = UploadRing(self._context, self._stream, check)
        self._pool = PinnedPool(self._context, check)

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
        return Tensor(pointer, tuple(shape), dtype, _Allocation(self._context, pointer, nbytes))

    def zeros(self, shape: Shape, dtype: Any) -> Tensor:
        tensor = self.empty(shape, dtype)
        self.fill_zero(tensor)
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

    def copy_to_host(self, source: Tensor) -> CudaReading:
        with self._lock:
            self.activate()
            slot = self._pool.take(source.size * source.dtype.itemsize)
            result = driver.cuMemcpyDtoHAsync(slot.pointer, source.pointer, slot.nbytes, self._stream)
            check(result, "in a copy to the host")
            check(driver.cuEventRecord(slot.event, self._stream), "recording an event")
        return CudaReading(self, self._pool, slot, source.shape, source.dtype)

    def synchronize(self) -> None:
        with self._lock:
            self.activate()
            check(driver.cuStreamSynchronize(self._stream), "in the work queued before")

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
                if status == _Result.CUDA_SUCCESS:
                    driver.cuGraphDestroy(unfinished)
                raise
            finally:
                self.capturing = False
            graph = check(driver.cuStreamEndCapture(self._stream), "ending a graph")
            try:
                _check_replayable(graph)
                return CudaGraph(self, graph)
            finally:
                driver.cuGraphDestroy(graph)

    def memory_info(self) -> tuple[int, int]:
        """Return the GPU's free and total memory in bytes."""
        self.activate()
        status, free, total = driver.cuMemGetInfo()
        check((status,), "asking for the memory in use")
        return free, total

    def _no_memory(self, nbytes: int) -> str:
        free, total = self.memory_info()
        return f"out of GPU memory: {nbytes} bytes wanted, {free} of {total} free on {self.description}"


class CudaReading:
    """A copy to pinned memory that has been queued."""

    def __init__(
        self, device: CudaDevice, pool: PinnedPool, slot: Any, shape: Shape, dtype: np.dtype
    ) -> None:
        self._device, self._pool, self._slot = device, pool, slot
        self._shape, self._dtype = shape, dtype

    def wait(self) -> np.ndarray:
        self._device.activate()
        check(driver.cuEventSynchronize(self._slot.event), "in the work queued before")
        array = self._slot.array.view(self._dtype).reshape(self._shape).copy()
        self._pool.give_back(self._slot)
        return array


class CudaGraph:
    """Work recorded by `CudaDevice.capture`.

    `nodes`: number of kernels, copies and fills per launch.
    """

    def __init__(self, device: CudaDevice, graph: Any) -> None:
        self.nodes = len(graph_nodes(graph))
        self._device = device
        self._exec = check(driver.cuGraphInstantiate(graph, 0), "making a graph ready")
        release_with(self, device._context, driver.cuGraphExecDestroy, self._exec)
        check(driver.cuGraphUpload(self._exec, device._stream), "uploading a graph")

    def launch(self, stream: Any) -> None:
        self._device.activate()
        check(driver.cuGraphLaunch(self._exec, self._device._stream), "launching a graph")


def graph_nodes(graph: Any) -> list[Any]:
    """Return the nodes of a recorded graph."""
    status, _, count = driver.cuGraphGetNodes(graph)
    check((status,), "reading a graph")
    status, nodes, count = driver.cuGraphGetNodes(graph, count)
    check((status,), "reading a graph")
    return list(nodes[:count])


def _check_replayable(graph: Any) -> None:
    """Raise EngineError if a node touches host memory.

    Each launch would repeat a library's copy from host memory, which by then has other contents or is freed.
    """
    kinds = driver.CUgraphNodeType
    for node in graph_nodes(graph):
        kind = check(driver.cuGraphNodeGetType(node), "reading a graph")
        if kind == kinds.CU_GRAPH_NODE_TYPE_HOST:
            raise EngineError("a graph cannot be recorded: it would call back to the host")
        if kind == kinds.CU_GRAPH_NODE_TYPE_MEMCPY:
            copy = check(driver.cuGraphMemcpyNodeGetParams(node), "reading a graph")
            for memory, pointer, side in (
                (copy.srcMemoryType, copy.srcDevice if int(copy.srcDevice) else copy.srcHost, "from"),
                (copy.dstMemoryType, copy.dstDevice if int(copy.dstDevice) else copy.dstHost, "to"),
            ):
                if not _on_device(memory, int(pointer)):
                    raise EngineError(f"a graph cannot be recorded: it would copy {side} host memory")


def _on_device(memory: Any, pointer: int) -> bool:
    if memory != driver.CUmemorytype.CU_MEMORYTYPE_UNIFIED:
        return memory == driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    status, kind = driver.cuPointerGetAttribute(attribute, pointer)
    return status == _Result.CUDA_SUCCESS and int(kind) == int(driver.CUmemorytype.CU_MEMORYTYPE_DEVICE)


class _Allocation:
    """Device memory, freed together with the last tensor that uses it."""

    def __init__(self, context: Any, pointer: int, nbytes: int) -> None:
        self.nbytes = nbytes
        release_with(self, context, driver.cuMemFree, pointer)
