# SPDX-License-Identifier: Apache-2.0
"""Pose and velocity of an odometry message; no ROS."""

from __future__ import annotations

import math
from typing import Any

MAX_POSITION_M, MAX_SPEED_M_S = 1e9, 1e4  # beyond every robot; larger numbers may overflow


def read_pose(message: Any) -> tuple[float, float, float, float, float]:
    """Return x, y, heading, and the speeds ahead and to the left.

    ValueError names the invalid field.
    """
    position, rotation = message.pose.pose.position, message.pose.pose.orientation
    speed = message.twist.twist.linear
    for name, value, limit in (
        ("pose.pose.position.x", position.x, MAX_POSITION_M),
        ("pose.pose.position.y", position.y, MAX_POSITION_M),
        ("pose.pose.orientation.x", rotation.x, math.inf),
        ("pose.pose.orientation.y", rotation.y, math.inf),
        ("pose.pose.orientation.z", rotation.z, math.inf),
        ("pose.pose.orientation.w", rotation.w, math.inf),
        ("twist.twist.linear.x", speed.x, MAX_SPEED_M_S),
        ("twist.twist.linear.y", speed.y, MAX_SPEED_M_S),
    ):
        if not math.isfinite(value):
            raise ValueError(f"odometry is not finite: {name} is {value}")
        if abs(value) > limit:
            raise ValueError(f"odometry is out of range: {name} is {value:g}, limit {limit:g}")
    norm = math.hypot(rotation.x, rotation.y, rotation.z, rotation.w)
    if not 0.9 < norm < 1.1:
        raise ValueError(f"odometry has no orientation: the quaternion's length is {norm:.3g}, expected 1")
    heading = math.atan2(
        2 * (rotation.w * rotation.z + rotation.x * rotation.y),
        rotation.w**2 + rotation.x**2 - rotation.y**2 - rotation.z**2,
    )
    return position.x, position.y, heading, speed.x, speed.y
