# SPDX-License-Identifier: Apache-2.0
"""The robot's speed over the last seconds."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque

CAPACITY = 2000
MAX_GAP_S = 0.5  # a time farther from all samples has no speed


class SpeedHistory:
    """Ring buffer of speeds, ordered by time."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, float]] = deque(maxlen=CAPACITY)

    def add(self, time: int, speed: float) -> None:
        """Store the speed (m/s) at `time` (ns), if it is after the newest stored time."""
        if not self._samples or time > self._samples[-1][0]:
            self._samples.append((time, speed))

    def clear(self) -> None:
        """Drop all samples."""
        self._samples.clear()

    def at(self, time: int) -> float | None:
        """Interpolate the speed at `time` (ns); None without a sample within MAX_GAP_S."""
        samples = list(self._samples)
        index = bisect_right(samples, (time, float("inf")))
        around = samples[max(index - 1, 0) : index + 1]
        near = [sample for sample in around if abs(sample[0] - time) <= MAX_GAP_S * 1e9]
        if len(near) < 2:
            return near[0][1] if near else None
        (before, speed), (after, next_speed) = near
        if not before <= time <= after:
            return speed if time < before else next_speed
        return speed + (next_speed - speed) * (time - before) / (after - before)
