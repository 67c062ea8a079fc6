# SPDX-License-Identifier: Apache-2.0
"""Odometry to trajectory history: where the robot was, seen from where it is when the frame is taken."""

from __future__ import annotations

import math
import threading
from collections import deque

import numpy as np
from nav_msgs.msg import Odometry

CAPACITY = 1000
MAX_GAP_S = 1.0  # odometry that pauses longer starts a new history
Sample = tuple[float, float, float, float, float]  # stamp (s), x, y, heading, speed
OUT_OF_ORDER_S = 0.5  # a stamp this far behind the newest is a new clock, not a late message


class OdometryBuffer:
    """Ring buffer of poses. Filled by a callback, read by the planning thread."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=CAPACITY)
        self._arrived = threading.Condition()
        self._problem = ""

    def add(self, message: Odometry) -> None:
        """Take one message.

        ValueError if it is not finite or not a pose; then `state_at` fails too, until a good one comes.
        """
        try:
            sample = _read(message)
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
        """Forget everything."""
        with self._arrived:
            self._samples.clear()
            self._problem = ""

    @property
    def problem(self) -> str:
        """What was wrong with the newest message; empty if nothing."""
        with self._arrived:
            return self._problem

    @property
    def newest_stamp(self) -> float | None:
        """Stamp of the newest sample in seconds, None if there is none."""
        with self._arrived:
            return self._samples[-1][0] if self._samples else None

    def wait_until(self, stamp: float, timeout_s: float) -> None:
        """Block until odometry reaches `stamp` (seconds), it is known to be broken, or the time is over.

        Without any odometry it returns at once: then nobody sends any.
        """
        with self._arrived:
            self._arrived.wait_for(
                lambda: self._problem or not self._samples or self._samples[-1][0] >= stamp, timeout_s
            )

    def state_at(
        self, stamp: float, num_points: int, dt: float, max_age: float
    ) -> tuple[np.ndarray | None, float | None]:
        """Past poses and speed at `stamp` (seconds).

        Returns history [num_points, 3] (x, y, heading) in the base frame at `stamp`, oldest first, `dt`
        apart, the last being (0, 0, 0), and the speed in m/s; (None, None) if no odometry ever came. Poses
        are interpolated; before the first sample the robot is taken to have stood still. ValueError if the
        newest message was broken, TimeoutError if odometry ended more than `max_age` seconds before
        `stamp`.
        """
        with self._arrived:
            if self._problem:
                raise ValueError(self._problem)
            if not self._samples:
                return None, None
            samples = np.array(self._samples)
        times = samples[:, 0]
        if stamp - times[-1] > max_age:
            raise TimeoutError(
                f"the newest odometry is {stamp - times[-1]:.2f} s older than the frame, limit {max_age:g} s"
            )
        at = stamp + dt * np.arange(1 - num_points, 1)
        x, y, speed = (np.interp(at, times, samples[:, column]) for column in (1, 2, 4))
        heading = np.interp(at, times, np.unwrap(samples[:, 3]))
        cos, sin = math.cos(heading[-1]), math.sin(heading[-1])
        dx, dy = x - x[-1], y - y[-1]
        history = np.column_stack([cos * dx + sin * dy, -sin * dx + cos * dy, heading - heading[-1]])
        return history, max(0.0, float(speed[-1]))


def _read(message: Odometry) -> Sample:
    position, rotation = message.pose.pose.position, message.pose.pose.orientation
    values = {
        "pose.pose.position.x": position.x,
        "pose.pose.position.y": position.y,
        "pose.pose.orientation.x": rotation.x,
        "pose.pose.orientation.y": rotation.y,
        "pose.pose.orientation.z": rotation.z,
        "pose.pose.orientation.w": rotation.w,
        "twist.twist.linear.x": message.twist.twist.linear.x,
    }
    for name, value in values.items():
        if not math.isfinite(value):
            raise ValueError(f"odometry is not finite: {name} is {value}")
    norm = math.sqrt(rotation.x**2 + rotation.y**2 + rotation.z**2 + rotation.w**2)
    if not 0.9 < norm < 1.1:
        raise ValueError(f"odometry has no orientation: the quaternion's length is {norm:.3g}, expected 1")
    heading = math.atan2(
        2 * (rotation.w * rotation.z + rotation.x * rotation.y),
        rotation.w**2 + rotation.x**2 - rotation.y**2 - rotation.z**2,
    )
    stamp = message.header.stamp
    return stamp.sec + stamp.nanosec * 1e-9, position.x, position.y, heading, message.twist.twist.linear.x
