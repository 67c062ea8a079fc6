# SPDX-License-Identifier: Apache-2.0
"""Trajectory history from odometry: past poses in the robot's base frame."""

from __future__ import annotations

import numpy as np

from edgellm_ros.ros.node.poses import past_poses, read_pose
from edgellm_ros.ros.node.sample_buffer import SampleBuffer


class OdometryBuffer(SampleBuffer):
    """The last poses of the robot.

    Messages whose numbers are not finite or too large, or whose orientation is not a unit quaternion, are
    refused.
    """

    def __init__(self) -> None:
        super().__init__("odometry", read_pose)

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
        samples = self.samples_for(stamp, max_age)
        return (None, None) if samples is None else past_poses(samples, stamp, num_points, dt)

    def newest_state(
        self, now: int, num_points: int, dt: float, max_age: float
    ) -> tuple[np.ndarray | None, float | None]:
        """Return past poses and speed at the newest sample, as `state_at` does.

        `now` (ns) is the node's time. StaleInputError if the sample is more than `max_age` seconds old.
        """
        samples = self.samples_now(now, max_age)
        if samples is None:
            return None, None
        return past_poses(samples, float(samples[-1, 0]), num_points, dt)
