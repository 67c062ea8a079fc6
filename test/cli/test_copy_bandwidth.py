# SPDX-License-Identifier: Apache-2.0
"""The bandwidth of a copy: bytes read plus bytes written, of the fastest of several copies."""

from __future__ import annotations

import time

import pytest

from edgellm_ros.cli.copy_bandwidth import copy_bandwidth
from edgellm_ros.engine.device import CpuDevice
from edgellm_ros.engine.tensor import Tensor


class SleepingDevice(CpuDevice):
    """Each copy takes longer than the one before."""

    def __init__(self) -> None:
        self.copies = 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.copies += 1
        time.sleep(0.02 * self.copies)


class QueueingDevice(SleepingDevice):
    """Copies take 20 ms each, and are only waited for in `synchronize`."""

    stream = "a stream"

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.copies += 1

    def synchronize(self) -> None:
        time.sleep(0.02 * self.copies)
        self.copies = 0


@pytest.mark.alone
@pytest.mark.parametrize("made", [SleepingDevice, QueueingDevice])
def test_bytes_read_and_written_count_over_the_fastest_copy(made):
    bandwidth = copy_bandwidth(made(), megabytes=1, repeats=3)
    expected = 2 * 2**20 / 0.02
    assert 0.6 * expected < bandwidth <= expected  # a busy machine sleeps longer, never shorter


def test_a_real_device_copies(device):
    assert copy_bandwidth(device, megabytes=8) > 1e8
