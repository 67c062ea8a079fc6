# SPDX-License-Identifier: Apache-2.0
"""The bandwidth of a copy, the fastest of several: bytes read plus bytes written."""

from __future__ import annotations

import pytest

from edgellm_ros.cli import copy_bandwidth as measured
from edgellm_ros.cli.copy_bandwidth import copy_bandwidth
from edgellm_ros.engine.device import CpuDevice
from edgellm_ros.engine.tensor import Tensor


class Clock:
    """A clock that stands still except for what a device does."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def perf_counter(self) -> float:
        return self.seconds


class WaitingDevice(CpuDevice):
    """Each copy takes longer than the one before."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.copies = 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.copies += 1
        self.clock.seconds += 0.02 * self.copies


class QueueingDevice(WaitingDevice):
    """Copies take 20 ms each, and are only waited for in `synchronize`."""

    stream = "a stream"

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.copies += 1

    def synchronize(self) -> None:
        self.clock.seconds += 0.02 * self.copies
        self.copies = 0


@pytest.mark.parametrize("made", [WaitingDevice, QueueingDevice])
def test_bytes_read_and_written_count_over_the_fastest_copy(monkeypatch, made):
    clock = Clock()
    monkeypatch.setattr(measured, "time", clock)
    bandwidth = copy_bandwidth(made(clock), megabytes=1, repeats=3)
    assert bandwidth == pytest.approx(2 * 2**20 / 0.02)


def test_a_real_device_copies(device):
    assert copy_bandwidth(device, megabytes=8) > 1e8
