# SPDX-License-Identifier: Apache-2.0
"""Poses of odometry messages, and a robot's past poses in its base frame; no ROS."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

MAX_POSITION_M, MAX_SPEED_M_S = 1e9, 1e4  # beyond every robot; larger numbers may overflow
Sample = tuple[float, float, float, float, float]  # stamp (s), x, y, heading, speed


def past_poses(samples: np.ndarray, stamp: float, num_points: int, dt: float) -> tuple[np.ndarray, float]:
    """Return past poses [num_points, 3] and speed at `stamp` (s), of samples [N, 5].

    The poses (x, y, heading) are in the base frame at `stamp`, oldest first, `dt` apart, interpolated; before
    the first sample the robot is assumed to stand still.
    """
    times = samples[:, 0]
    at = stamp + dt * np.arange(1 - num_points, 1)
    x, y, speed = (np.interp(at, times, samples[:, column]) for column in (1, 2, 4))
    heading = np.interp(at, times, np.unwrap(samples[:, 3]))
    cos, sin = math.cos(heading[-1]), math.sin(heading[-1])
    dx, dy = x - x[-1], y - y[-1]
    history = np.column_stack([cos * dx + sin * dy, -sin * dx + cos * dy, heading - heading[-1]])
    return history, max(0.0, float(speed[-1]))


def read_pose(message: Any) -> tuple[float, float, float, float]:
    """Return x, y, heading and speed. ValueError names the invalid field."""
    position, rotation = message.pose.pose.position, message.pose.pose.orientation
    speed = message.twist.twist.linear.x
    for name, value, limit in (
        ("pose.pose.position.x", position.x, MAX_POSITION_M),
        ("pose.pose.position.y", position.y, MAX_POSITION_M),
        ("pose.pose.orientation.x", rotation.x, math.inf),
        ("pose.pose.orientation.y", rotation.y, math.inf),
        ("pose.pose.orientation.z", rotation.z, math.inf),
        ("pose.pose.orientation.w", rotation.w, math.inf),
        ("twist.twist.linear.x", speed, MAX_SPEED_M_S),
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
    return position.x, position.y, heading, speed
