# SPDX-License-Identifier: Apache-2.0
"""A device in host memory that is as asynchronous as a GPU.

Copies, kernels and engine runs are queued; the queue runs when the host waits: at `download`, `synchronize`,
`HostCopy.wait` and `Mark.seconds_since` (which stop at their place). So code that reads too early gets old
contents, and code that reuses a buffer too early gets overwritten contents. Tensors have no `array`; new
memory is filled with junk.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from edgellm_ros.engine.device import on_device
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.tensor import Shape, Tensor, check_same

ALIGNMENT = 256  # of addresses of cuMemAlloc
JUNK = 0xAB
devices: weakref.WeakValueDictionary[int, DeferredDevice] = weakref.WeakValueDictionary()  # by stream handle


class Buffer:
    """Memory of a device, in bytes."""

    def __init__(self, device: DeferredDevice, nbytes: int) -> None:
        raw = np.full(max(1, nbytes) + ALIGNMENT, JUNK, np.uint8)
        offset = -raw.__array_interface__["data"][0] % ALIGNMENT
        self.device = device
        self.bytes = raw[offset : offset + max(1, nbytes)]
        self.pointer = self.bytes.__array_interface__["data"][0]


class Stream:
    """A queue of work. `handle`: the number that libraries get as the stream."""

    _handles = itertools.count(0x51)

    def __init__(self) -> None:
        self.handle = next(self._handles)


class DeferredDevice:
    """See the module. `name`: selects the backend of engines."""

    memory = "cpu"
    arch = "host"
    description = "Test double (host)"
    runs_beside = False
    short_parts = True
    max_queued_steps = 1
    allow_plan_code = False
    has_graphs = True
    capturing = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.stream = Stream()
        self._buffers: weakref.WeakValueDictionary[int, Buffer] = weakref.WeakValueDictionary()
        self._pointers: list[int] = []  # of all buffers so far, ascending
        self._queue: deque[Callable[[], None]] = deque()
        self._lock = threading.RLock()
        devices[self.stream.handle] = self

    def activate(self) -> None:
        pass

    def empty(self, shape: Shape, dtype: Any) -> Tensor:
        dtype = np.dtype(dtype)
        self._not_in_a_graph("an allocation")
        buffer = Buffer(self, int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        with self._lock:
            if buffer.pointer not in self._buffers:
                bisect.insort(self._pointers, buffer.pointer)
            self._buffers[buffer.pointer] = buffer
        return Tensor(buffer.pointer, tuple(shape), dtype, buffer)

    def zeros(self, shape: Shape, dtype: Any) -> Tensor:
        tensor = self.empty(shape, dtype)
        self.fill_zero(tensor)
        return tensor

    def adopt(self, array: np.ndarray) -> Tensor:
        return on_device(self, array)

    def upload(self, target: Tensor, source: np.ndarray) -> None:
        check_same(target, source)
        self._not_in_a_graph("a copy from host memory")
        source = source.copy()
        self.queue(lambda: np.copyto(host_view(target), source))

    def download(self, source: Tensor) -> np.ndarray:
        self.synchronize()
        return host_view(source).copy()

    def copy(self, target: Tensor, source: Tensor) -> None:
        check_same(target, source)
        self.queue(lambda: np.copyto(host_view(target), host_view(source)))

    def fill_zero(self, target: Tensor) -> None:
        self.queue(lambda: host_view(target).fill(0))

    def copy_to_host(self, source: Tensor) -> DeferredHostCopy:
        self._not_in_a_graph("a copy to host memory")
        host_copy = DeferredHostCopy(self)
        self.queue(lambda: host_copy.contents.append(host_view(source).copy()))
        return host_copy

    def mark(self) -> DeferredMark:
        self._not_in_a_graph("a mark")
        mark = DeferredMark(self)
        self.queue(lambda: mark.times.append(time.perf_counter()))
        return mark

    def capture(self, record: Callable[[], None]) -> DeferredGraph:
        with self._lock:
            waiting, self._queue = self._queue, deque()
            self.capturing = True
            try:
                record()
                return DeferredGraph(self, list(self._queue))
            finally:
                self.capturing = False
                self._queue = waiting

    def memory_info(self) -> tuple[int, int]:
        return 0, 0

    def synchronize(self) -> None:
        self.work(lambda: not self._queue)

    def queue(self, work: Callable[[], None]) -> None:
        """Append work to the queue."""
        with self._lock:
            self._queue.append(work)

    def work(self, done: Callable[[], bool]) -> None:
        """Run queued work in order until `done()`."""
        self._not_in_a_graph("waiting for the device")
        with self._lock:
            while not done():
                try:
                    self._queue.popleft()()
                except BaseException:
                    self._queue.clear()
                    raise

    def buffer_at(self, pointer: int, nbytes: int) -> Buffer | None:
        """Return the live buffer of this device that has all these bytes, else None.

        A caller that keeps the buffer until queued work has run does what cuMemFree does: it waits.
        """
        with self._lock:
            for start in reversed(self._pointers[: bisect.bisect(self._pointers, pointer)]):
                buffer = self._buffers.get(start)
                if buffer is not None:
                    return buffer if pointer + nbytes <= start + len(buffer.bytes) else None
                self._pointers.remove(start)
            return None

    def _not_in_a_graph(self, what: str) -> None:
        if self.capturing:
            raise EngineError(f"a graph cannot be recorded: it has {what}")


class DeferredMark:
    """The time at which the queue reached it."""

    def __init__(self, device: DeferredDevice) -> None:
        self._device = device
        self.times: list[float] = []

    def seconds_since(self, earlier: DeferredMark) -> float:
        self._device.work(lambda: bool(self.times))
        return self.times[0] - earlier.times[0]


class DeferredHostCopy:
    """The copy that `copy_to_host` queued."""

    def __init__(self, device: DeferredDevice) -> None:
        self._device = device
        self.contents: list[np.ndarray] = []

    def wait(self) -> np.ndarray:
        self._device.work(lambda: bool(self.contents))
        return self.contents.pop()


class DeferredGraph:
    """Recorded work, queued again by each launch."""

    def __init__(self, device: DeferredDevice, work: list[Callable[[], None]]) -> None:
        self.nodes = len(work)
        self._device, self._work = device, work

    def launch(self, stream: Any) -> None:
        for work in self._work:
            self._device.queue(work)


class QueuedKernels:
    """Host kernels: queued for tensors of a DeferredDevice, run at once for others."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> Callable[..., None]:
        kernel = getattr(self._kernels, name)

        def launch(*arguments: Any) -> None:
            device = next(filter(None, map(_device_of, arguments)), None)
            if device is None:
                kernel(*arguments)
            else:
                values = [_by_value(argument) for argument in arguments]
                device.queue(lambda: kernel(*map(_on_host, values)))

        return launch


def host_view(tensor: Tensor) -> np.ndarray:
    """Return a tensor's memory as an array.

    This is for queued work that runs, not for tests.
    """
    buffer = tensor.owner
    start = tensor.pointer - buffer.pointer
    nbytes = tensor.size * tensor.dtype.itemsize
    return buffer.bytes[start : start + nbytes].view(tensor.dtype).reshape(tensor.shape)


def _device_of(value: Any) -> DeferredDevice | None:
    """Return the device of the tensors in an argument, None without tensors."""
    if isinstance(value, Tensor):
        return value.owner.device if isinstance(value.owner, Buffer) else None
    if dataclasses.is_dataclass(value):
        return next(filter(None, map(_device_of, vars(value).values())), None)
    return None


def _by_value(value: Any) -> Any:
    """Copy an argument as a kernel launch does; device memory is passed by address."""
    return value.copy() if isinstance(value, np.ndarray | list | dict) else value


def _on_host(value: Any) -> Any:
    """Return an argument for the host kernels: tensors have arrays."""
    if isinstance(value, Tensor):
        return Tensor(value.pointer, value.shape, value.dtype, value.owner, host_view(value))
    if dataclasses.is_dataclass(value):
        return dataclasses.replace(value, **{name: _on_host(part) for name, part in vars(value).items()})
    return value
