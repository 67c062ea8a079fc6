# SPDX-License-Identifier: Apache-2.0
"""How much memory of a device is in use, and the most that was in use meanwhile."""

from __future__ import annotations

import threading
from types import TracebackType

from edgellm_ros.engine.device import Device
from edgellm_ros.ros.node.metrics import resident_memory


def used_bytes(device: Device) -> int:
    """On a GPU everything that is not free, whoever has it; on the host what is resident of this process."""
    if device.memory == "cpu":
        return resident_memory()
    free, total = device.memory_info()
    return total - free


class PeakMemory:
    """Looks every few milliseconds, as long as it is entered; `peak` is the most bytes that it saw.

    Asking a GPU costs time: not around what is timed.
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
        """Bytes in use now."""
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
