# SPDX-License-Identifier: Apache-2.0
"""UploadRing with a driver that reads pinned memory only when the host waits."""

import ctypes
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="needs requirements-cuda.txt")

from edgellm_ros.engine.cuda import staging as cuda_staging
from edgellm_ros.engine.cuda.staging import PIECE_BYTES, RING_BYTES, UploadRing

pytestmark = pytest.mark.only_on("cpu", reason="these tests bring their own driver")


class LateDriver:
    """The CUDA driver's calls that UploadRing uses, on host memory."""

    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)
    cuMemFreeHost = cuEventDestroy = None

    def __init__(self) -> None:
        self.queue: deque = deque()  # of copies, and of events by number
        self.memory: list[np.ndarray] = []
        self.events = 0

    def cuMemAllocHost(self, nbytes):
        self.memory.append(np.empty(nbytes, np.uint8))
        return 0, self.memory[-1].ctypes.data

    def cuEventCreate(self, flags):
        self.events += 1
        return 0, self.events

    def cuMemcpyHtoDAsync(self, target, source, nbytes, stream):
        assert any(0 <= source - m.ctypes.data <= len(m) - nbytes for m in self.memory), "not pinned"
        self.queue.append((target, source, nbytes))
        return (0,)

    def cuEventRecord(self, event, stream):
        self.queue.append(event)
        return (0,)

    def cuEventSynchronize(self, event):
        while event in self.queue:
            self.work()
        return (0,)

    def work(self) -> None:
        piece = self.queue.popleft()
        if isinstance(piece, tuple):
            ctypes.memmove(*piece)


@pytest.fixture
def driver(monkeypatch):
    driver = LateDriver()
    monkeypatch.setattr(cuda_staging, "driver", driver)
    monkeypatch.setattr(cuda_staging, "release_with", lambda *arguments: None)
    return driver


@pytest.mark.parametrize("nbytes", [1, 63, PIECE_BYTES, PIECE_BYTES + 1, RING_BYTES - 8, 5 * RING_BYTES + 3])
def test_arrays_of_all_sizes_may_be_changed_and_freed_at_once(driver, nbytes):
    ring = UploadRing(None, None, lambda result, doing: result[-1])
    rng = np.random.default_rng(nbytes)
    wanted = [rng.integers(0, 256, nbytes, np.uint8) for _ in range(7)]
    targets = [np.zeros(nbytes, np.uint8) for _ in wanted]
    for target, values in zip(targets, wanted, strict=True):
        source = values.copy()
        ring.upload(target.ctypes.data, source)
        source[:] = 0
    while driver.queue:
        driver.work()
    for target, values in zip(targets, wanted, strict=True):
        assert np.array_equal(target, values)
