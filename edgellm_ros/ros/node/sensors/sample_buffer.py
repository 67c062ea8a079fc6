# SPDX-License-Identifier: Apache-2.0
"""A ring buffer of stamped samples, such as poses.

A plan takes the samples at the time of its frame.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from edgellm_ros.ros.messaging import NANOSECONDS, to_nanoseconds
from edgellm_ros.ros.node.sensors.input_time import StaleInputError, check_age, check_not_future

CAPACITY = 1000
MAX_GAP_S = 1.0  # after a longer pause only the samples behind it count
OUT_OF_ORDER_S = 0.5  # a stamp further behind the newest means that the clock was reset


class SampleBuffer:
    """Samples of one topic. Filled by a callback, read by the planning threads."""

    def __init__(self, name: str, read: Callable[[Any], tuple[float, ...]]) -> None:
        """Hold no samples.

        `name`: of a sample, for errors; `read` returns the values of a message.
        """
        self._name = name
        self._read = read
        self._samples: deque[tuple[float, ...]] = deque(maxlen=CAPACITY)  # stamp in seconds, values
        self._arrived = threading.Condition()
        self._problem = ""

    def add(self, message: Any, arrival: int | None = None, tolerance_s: float = 0.0) -> None:
        """Store one message at its stamp or, without a stamp, at its arrival.

        `arrival` in ns of the node's clock. ValueError if `read` raises it, or if the stamp is more than
        `tolerance_s` after the arrival. Then reading fails too, until a valid message arrives.
        """
        try:
            stamp = to_nanoseconds(message.header.stamp) or arrival or 0
            if arrival is not None:
                check_not_future(self._name, stamp, arrival, tolerance_s)
            sample = (stamp / NANOSECONDS, *self._read(message))
        except ValueError as error:
            with self._arrived:
                self._problem = str(error)
                self._arrived.notify_all()
            raise
        with self._arrived:
            self._problem = ""
            if self._samples:
                elapsed = sample[0] - self._samples[-1][0]
                if elapsed > MAX_GAP_S or elapsed < -OUT_OF_ORDER_S:
                    self._samples.clear()
                elif elapsed <= 0:
                    return
            self._samples.append(sample)
            self._arrived.notify_all()

    def clear(self) -> None:
        """Drop all samples."""
        with self._arrived:
            self._samples.clear()
            self._problem = ""

    @property
    def problem(self) -> str:
        """The problem with the newest message; empty for a valid message."""
        with self._arrived:
            return self._problem

    @property
    def newest_stamp(self) -> float | None:
        """Stamp of the newest sample in seconds; None without samples."""
        with self._arrived:
            return self._samples[-1][0] if self._samples else None

    def wait_until(self, stamp: float, timeout_s: float) -> None:
        """Block until the samples reach `stamp` (seconds), at most for `timeout_s`.

        Returns at once if no sample has ever arrived, or when an invalid message arrives.
        """
        with self._arrived:
            self._arrived.wait_for(
                lambda: self._problem or not self._samples or self._samples[-1][0] >= stamp, timeout_s
            )

    def samples_for(self, stamp: float, max_age: float, before: float = 0.0) -> np.ndarray | None:
        """Return the samples [N, 1 + values], oldest first, for a frame at `stamp` (s).

        A row is a stamp in seconds, and the values. The samples reach back to `before` seconds before the
        stamp, or to the first one. None if no sample has ever arrived. ValueError if the
        newest message is invalid, StaleInputError if samples ended more than `max_age` seconds before
        `stamp`.
        """
        samples = self._since(stamp - before)
        if samples is not None and (behind := stamp - samples[-1, 0]) > max_age:
            raise StaleInputError(
                f"the newest {self._name} is {behind:.2f} s older than the frame, limit {max_age:g} s "
                "(parameter max_input_age)"
            )
        return samples

    def samples_now(self, now: int, max_age: float, before: float = 0.0) -> np.ndarray | None:
        """Return the samples [N, 1 + values], oldest first, for a plan without a time.

        `now` (ns) is the node's time. StaleInputError if the newest sample is more than `max_age` seconds
        old; otherwise as `samples_for` at the stamp of the newest sample.
        """
        samples = self.newest(before)
        if samples is not None:
            stamp = round(float(samples[-1, 0]) * NANOSECONDS)
            check_age(f"the newest {self._name}", stamp, now, max_age)
        return samples

    def newest(self, before: float = 0.0) -> np.ndarray | None:
        """Return the samples [N, 1 + values] of the last `before` seconds, oldest first.

        They end at the newest sample, and reach back to one at or before their begin. None if no sample has
        ever arrived. ValueError if the newest message is invalid.
        """
        newest = self.newest_stamp
        return self._since(-np.inf if newest is None else newest - before)

    def _since(self, start: float) -> np.ndarray | None:
        """Return the samples from the last one at or before `start` (s) on."""
        with self._arrived:
            if self._problem:
                raise ValueError(self._problem)
            needed = []
            for sample in reversed(self._samples):
                needed.append(sample)
                if sample[0] <= start:
                    break
        return np.array(needed[::-1]) if needed else None
