# SPDX-License-Identifier: Apache-2.0
"""Memory in use on a device, and its peak over a period."""

from __future__ import annotations

import threading
from types import TracebackType

from edgellm_ros.engine.device import Device
from edgellm_ros.ros.node.metrics import resident_memory


def used_bytes(device: Device) -> int:
    """Return the bytes in use.

    On a GPU: all used memory, with that of other processes. On the CPU: this process's resident memory.
    """
    if device.memory == "cpu":
        return resident_memory()
    free, total = device.memory_info()
    return total - free


class PeakMemory:
    """Polls the memory in use while it is entered.

    `peak` is the largest value in bytes.     Polling a GPU takes time, so no measurement of time may run
    inside.
    """

    def __init__(self, device: Device, period: float = 0.01) -> None:
        self.peak = 0
        self._device = device
        self._period = period
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._done.wait(self._period):
            self.look()

    def look(self) -> int:
        """Return the bytes in use now and update the peak."""
        used = used_bytes(self._device)
        self.peak = max(self.peak, used)
        return used

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()
        self.look()
