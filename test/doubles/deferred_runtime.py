# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime and the host's kernels on a DeferredDevice, and a device that counts what is asked of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from doubles.deferred_device import DeferredDevice, DeferredGraph, DeferredReading, QueuedKernels
from edgellm_ros.engine.onnxruntime_backend import OnnxRuntimeBackend
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels import host
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest


class WatchedDevice(DeferredDevice):
    """Counts in `calls`: uploads, downloads, readings, waits for all work, graphs recorded and launched.

    `most_readings`: how many were under way at a time.
    """

    def __init__(self) -> None:
        super().__init__("deferred")
        self.calls: Counter[str] = Counter()
        self.readings = self.most_readings = 0

    def upload(self, target: Tensor, source: np.ndarray) -> None:
        self.calls["upload"] += 1
        super().upload(target, source)

    def download(self, source: Tensor) -> np.ndarray:
        self.calls["download"] += 1
        return super().download(source)

    def copy_to_host(self, source: Tensor) -> WatchedReading:
        self.calls["copy_to_host"] += 1
        self.readings += 1
        self.most_readings = max(self.readings, self.most_readings)
        return WatchedReading(self, super().copy_to_host(source))

    def capture(self, record: Callable[[], None]) -> WatchedGraph:
        self.calls["capture"] += 1
        return WatchedGraph(self, super().capture(record))

    def waiting(self) -> int:
        """Pieces of work that are queued."""
        return len(self._queue)


class WatchedReading:
    def __init__(self, device: WatchedDevice, reading: DeferredReading) -> None:
        self._device, self._reading = device, reading

    def wait(self) -> np.ndarray:
        self._device.readings -= 1
        return self._reading.wait()


class WatchedGraph:
    def __init__(self, device: WatchedDevice, graph: DeferredGraph) -> None:
        self._device, self._graph = device, graph

    def launch(self, stream: Any) -> None:
        self._device.calls["launch"] += 1
        self._graph.launch(stream)


@contextmanager
def queueing() -> Iterator[None]:
    """While it lasts, engines and kernels that work on a DeferredDevice are queued there."""
    run, host_kernels = OnnxRuntimeBackend.run, host.HostKernels

    def queue_run(backend: OnnxRuntimeBackend, bound: Any, stream: Any) -> None:
        if isinstance(backend._device, DeferredDevice):
            backend._device.queue(lambda: run(backend, bound, stream))
        else:
            run(backend, bound, stream)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OnnxRuntimeBackend, "run", queue_run)
        patch.setattr(host, "HostKernels", lambda: QueuedKernels(host_kernels()))
        yield


def used(runtime: LLMInferenceRuntime, *requests: LLMGenerationRequest) -> tuple[int, int]:
    """Graphs launched and recorded on a WatchedDevice while a batch was answered."""
    calls = runtime.pipeline.device.calls
    calls.clear()
    runtime.handle_request(list(requests))
    return calls["launch"], calls["capture"]
