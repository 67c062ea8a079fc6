# SPDX-License-Identifier: Apache-2.0
"""Trajectory history from odometry: past poses in the robot's base frame."""

from __future__ import annotations

from edgellm_ros.ros.node.sensors.past_motion import Agreement, PastMotion, compare, past_motion
from edgellm_ros.ros.node.sensors.poses import read_pose
from edgellm_ros.ros.node.sensors.sample_buffer import SampleBuffer


class OdometryBuffer(SampleBuffer):
    """The last poses and velocities of the robot.

    Messages whose numbers are not finite or too large, or whose orientation is not a unit quaternion, are
    refused.
    """

    def __init__(self) -> None:
        super().__init__("odometry", read_pose)

    def state_at(self, stamp: float, num_points: int, dt: float, max_age: float) -> PastMotion | None:
        """Return past poses and speed at `stamp` (seconds), as `past_motion` makes them.

        None if no odometry has ever arrived. ValueError if the newest message is invalid, StaleInputError if
        odometry ended more than `max_age` seconds before `stamp`.
        """
        samples = self.samples_for(stamp, max_age, (num_points - 1) * dt)
        return None if samples is None else past_motion(samples, stamp, num_points, dt)

    def newest_state(self, now: int, num_points: int, dt: float, max_age: float) -> PastMotion | None:
        """Return past poses and speed at the newest sample, as `state_at` does.

        `now` (ns) is the node's time. StaleInputError if the sample is more than `max_age` seconds old.
        """
        samples = self.samples_now(now, max_age, (num_points - 1) * dt)
        if samples is None:
            return None
        return past_motion(samples, float(samples[-1, 0]), num_points, dt)

    def agreement(self, seconds: float) -> Agreement | None:
        """Compare poses and twist in the `seconds` up to the newest sample.

        None without samples, or if the newest message is invalid.
        """
        samples = None if self.problem else self.newest(seconds)
        return None if samples is None else compare(samples, float(samples[-1, 0]), seconds)
