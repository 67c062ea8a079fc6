# SPDX-License-Identifier: Apache-2.0
"""Motions of an arm as messages of its controller."""

from __future__ import annotations

from collections.abc import Sequence

from builtin_interfaces.msg import Duration
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

from edgellm_ros.ros.arm.motion import Motion
from edgellm_ros.ros.messaging import NANOSECONDS, to_time


def to_trajectory(motion: Motion, names: Sequence[str], stamp: int) -> JointTrajectory:
    """Return the motion with positions and velocities. `stamp`: its start in ns."""
    trajectory = JointTrajectory(joint_names=list(names))
    trajectory.header.stamp = to_time(stamp)
    for index, (positions, speeds) in enumerate(zip(motion.positions, motion.speeds, strict=True)):
        sec, nanosec = divmod(round(index * motion.period * NANOSECONDS), NANOSECONDS)
        point = JointTrajectoryPoint(positions=positions.tolist(), velocities=speeds.tolist())
        point.time_from_start = Duration(sec=sec, nanosec=nanosec)
        trajectory.points.append(point)
    return trajectory
