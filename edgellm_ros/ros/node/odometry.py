# SPDX-License-Identifier: Apache-2.0
"""Trajectory history from odometry: past poses in the robot's base frame."""

from __future__ import annotations

import threading
from collections import deque

import numpy as np
from nav_msgs.msg import Odometry

from edgellm_ros.ros.messaging import NANOSECONDS, to_nanoseconds
from edgellm_ros.ros.node.input_time import StaleInputError, check_age, check_not_future
from edgellm_ros.ros.node.poses import Sample, past_poses, read_pose

CAPACITY = 1000
MAX_GAP_S = 1.0  # a longer pause of the odometry starts a new history
OUT_OF_ORDER_S = 0.5  # a stamp further behind the newest means that the clock was reset


class OdometryBuffer:
    """Ring buffer of poses. Filled by a callback, read by the planning thread."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=CAPACITY)
        self._arrived = threading.Condition()
        self._problem = ""

    def add(self, message: Odometry, arrival: int | None = None, tolerance_s: float = 0.0) -> None:
        """Store one message at its stamp or, without a stamp, at its arrival.

        `arrival` in ns of the node's clock. ValueError if a number is not finite or too large, if the
        orientation is not a unit quaternion, or if the stamp is more than `tolerance_s` after the arrival.
        Then `state_at` fails too, until a valid message arrives.
        """
        try:
            stamp = to_nanoseconds(message.header.stamp) or arrival or 0
            if arrival is not None:
                check_not_future("odometry", stamp, arrival, tolerance_s)
            sample = (stamp / NANOSECONDS, *read_pose(message))
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
        """Block until odometry reaches `stamp` (seconds), at most for `timeout_s`.

        Returns at once if no odometry has ever arrived, or when an invalid message arrives.
        """
        with self._arrived:
            self._arrived.wait_for(
                lambda: self._problem or not self._samples or self._samples[-1][0] >= stamp, timeout_s
            )

    def state_at(
        self, stamp: float, num_points: int, dt: float, max_age: float
    ) -> tuple[np.ndarray | None, float | None]:
        """Return past poses and speed at `stamp` (seconds).

        The history [num_points, 3] (x, y, heading) is in the base frame at `stamp`, oldest first, `dt` apart;
        the last pose is (0, 0, 0). The speed is in m/s. (None, None) if no odometry has ever arrived. Poses
        are interpolated; before the first sample the robot is assumed to stand still. ValueError if the
        newest message is invalid, StaleInputError if odometry ended more than `max_age` seconds before
        `stamp`.
        """
        samples = self._copy()
        if samples is None:
            return None, None
        behind = stamp - samples[-1, 0]
        if behind > max_age:
            raise StaleInputError(
                f"the newest odometry is {behind:.2f} s older than the frame, limit {max_age:g} s "
                "(parameter max_input_age)"
            )
        return past_poses(samples, stamp, num_points, dt)

    def newest_state(
        self, now: int, num_points: int, dt: float, max_age: float
    ) -> tuple[np.ndarray | None, float | None]:
        """Return past poses and speed at the newest sample, as `state_at` does.

        `now` (ns) is the node's time. StaleInputError if the sample is more than `max_age` seconds old.
        """
        samples = self._copy()
        if samples is None:
            return None, None
        newest = float(samples[-1, 0])
        check_age("the newest odometry", round(newest * NANOSECONDS), now, max_age)
        return past_poses(samples, newest, num_points, dt)

    def _copy(self) -> np.ndarray | None:
        """Return the samples [N, 5]; None without samples.

        ValueError if the newest message is invalid.
        """
        with self._arrived:
            if self._problem:
                raise ValueError(self._problem)
            return np.array(self._samples) if self._samples else None
