# SPDX-License-Identifier: Apache-2.0
"""Follows trajectories as a joint_trajectory_controller of ros2_control does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
NANOSECONDS = 1_000_000_000


class TrajectoryController:
    """Interpolates the newest trajectory by its stamps. Times are in ns.

    - A new trajectory replaces the old one whole, and points of the past are dropped. Before the first point
      the motion goes there from the present command.
    - Between two points each joint moves along the cubic spline of their positions and speeds.
    - The last point is held, at rest.
    """

    def __init__(self, positions: Array) -> None:
        self.hold(positions)

    def hold(self, positions: Array) -> None:
        """Stand at `positions` [J] until the next trajectory."""
        self._times = np.zeros(1, np.int64)
        self._positions = np.asarray(positions, np.float64)[None].copy()
        self._speeds = np.zeros_like(self._positions)

    def follow(self, now: int, times: Sequence[int], positions: Array, speeds: Array) -> None:
        """Replace the trajectory.

        times: [N] ns, increasing; positions, speeds: [N, J]. A trajectory without later points is ignored.
        ValueError for times that do not increase, shapes that do not fit, or values that are not finite.
        """
        stamps = np.asarray(times, np.int64)
        shape = (len(stamps), self._positions.shape[1])
        if np.shape(positions) != shape or np.shape(speeds) != shape:
            raise ValueError(
                f"a trajectory of {np.shape(positions)} positions and {np.shape(speeds)} speeds, expected "
                f"{shape}"
            )
        if (np.diff(stamps) <= 0).any():
            raise ValueError("the times of a trajectory must increase")
        if not (np.isfinite(positions).all() and np.isfinite(speeds).all()):
            raise ValueError("a trajectory must have finite positions and speeds")
        if not len(stamps) or stamps[-1] <= now:
            return
        positions, speeds = np.asarray(positions, np.float64), np.asarray(speeds, np.float64)
        if stamps[0] > now:
            position, speed = self.at(now)
            stamps = np.concatenate([[now], stamps])
            positions, speeds = np.vstack([position, positions]), np.vstack([speed, speeds])
        first = int(np.searchsorted(stamps, now, side="right")) - 1
        self._times, self._positions, self._speeds = stamps[first:], positions[first:], speeds[first:]

    @property
    def end(self) -> int:
        """The time of the last point."""
        return int(self._times[-1])

    def at(self, time: int) -> tuple[Array, Array]:
        """Return the commanded positions and speeds [J] at a time."""
        if time >= self.end:
            return self._positions[-1], np.zeros_like(self._positions[-1])
        index = max(int(np.searchsorted(self._times, time, side="right")) - 1, 0)
        begin, span = self._times[index], (self._times[index + 1] - self._times[index]) / NANOSECONDS
        part = max((time - int(begin)) / NANOSECONDS / span, 0.0)
        (p0, p1), (v0, v1) = self._positions[index : index + 2], self._speeds[index : index + 2]
        # The spline p0 + part * (a + part * (b + part * c)).
        a, change = span * v0, p1 - p0
        b = 3 * change - span * (2 * v0 + v1)
        c = span * (v0 + v1) - 2 * change
        return p0 + part * (a + part * (b + part * c)), (a + part * (2 * b + 3 * part * c)) / span
