# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime and host kernels on a DeferredDevice; a device that counts calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from doubles.deferred_device import (
    DeferredDevice,
    DeferredGraph,
    DeferredHostCopy,
    DeferredMark,
    QueuedKernels,
)
from edgellm_ros.engine.onnxruntime.backend import OnnxRuntimeBackend
from edgellm_ros.engine.tensor import Shape, Tensor
from edgellm_ros.kernels import host, tree_host
from edgellm_ros.runtime import pipeline
from edgellm_ros.runtime.encoders import Encoders
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.prefill import Prefill
from edgellm_ros.runtime.request import LLMGenerationRequest


class WatchedDevice(DeferredDevice):
    """A device that counts calls.

    `calls`: numbers of uploads, downloads, copies to the host, marks, captures and launches of graphs, and of
    all that the host has `queued`: these, kernels, engine runs, copies on the device.
    `most_host_copies`: the largest number of unfinished copies to the host so far. `allocations`: sizes in
    bytes of all buffers, in order.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.launching = False  # of a graph
        self.host_copies = self.most_host_copies = 0
        self.allocations: list[int] = []
        super().__init__("deferred")

    def empty(self, shape: Shape, dtype: Any) -> Tensor:
        tensor = super().empty(shape, dtype)
        self.allocations.append(tensor.size * tensor.dtype.itemsize)
        return tensor

    def upload(self, target: Tensor, source: np.ndarray) -> None:
        self.calls["upload"] += 1
        super().upload(target, source)

    def download(self, source: Tensor) -> np.ndarray:
        self.calls["download"] += 1
        return super().download(source)

    def mark(self) -> DeferredMark:
        self.calls["mark"] += 1
        return super().mark()

    def copy_to_host(self, source: Tensor) -> WatchedHostCopy:
        self.calls["copy_to_host"] += 1
        self.host_copies += 1
        self.most_host_copies = max(self.host_copies, self.most_host_copies)
        return WatchedHostCopy(self, super().copy_to_host(source))

    def queue(self, work: Callable[[], None]) -> None:
        self.calls["queued"] += not (self.capturing or self.launching)
        super().queue(work)

    def capture(self, record: Callable[[], None]) -> WatchedGraph:
        self.calls["capture"] += 1
        return WatchedGraph(self, super().capture(record))

    def waiting(self) -> int:
        """Return the length of the queue."""
        return len(self._queue)


class WatchedHostCopy:
    def __init__(self, device: WatchedDevice, host_copy: DeferredHostCopy) -> None:
        self._device, self._host_copy = device, host_copy

    def wait(self) -> np.ndarray:
        self._device.host_copies -= 1
        return self._host_copy.wait()


class WatchedGraph:
    def __init__(self, device: WatchedDevice, graph: DeferredGraph) -> None:
        self._device, self._graph = device, graph

    def launch(self, stream: Any) -> None:
        self._device.calls["launch"] += 1
        self._device.calls["queued"] += 1
        self._device.launching = True
        self._graph.launch(stream)
        self._device.launching = False


@contextmanager
def queueing() -> Iterator[None]:
    """Inside the block, a DeferredDevice queues its engine runs and kernels."""
    run, host_kernels, tree_kernels = OnnxRuntimeBackend.run, host.HostKernels, tree_host.HostTreeKernels

    def queue_run(backend: OnnxRuntimeBackend, bound: Any, stream: Any) -> None:
        if isinstance(backend._device, DeferredDevice):
            backend._device.queue(lambda: run(backend, bound, stream))
        else:
            run(backend, bound, stream)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OnnxRuntimeBackend, "run", queue_run)
        patch.setattr(host, "HostKernels", lambda: QueuedKernels(host_kernels()))
        patch.setattr(tree_host, "HostTreeKernels", lambda: QueuedKernels(tree_kernels()))
        yield


@contextmanager
def without_warm_up() -> Iterator[None]:
    """Inside the block, a runtime runs nothing when it is made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prefill, "warm_up", lambda prefill, device: None)
        patch.setattr(Encoders, "warm_up", lambda encoders, device: None)
        patch.setattr(pipeline, "answer_in_advance", lambda pipeline, metrics: None)
        yield


def used(runtime: LLMInferenceRuntime, *requests: LLMGenerationRequest) -> tuple[int, int]:
    """Answer a batch on a WatchedDevice; return its launches and captures of graphs."""
    calls = runtime.pipeline.device.calls
    calls.clear()
    runtime.handle_request(list(requests))
    return calls["launch"], calls["capture"]
