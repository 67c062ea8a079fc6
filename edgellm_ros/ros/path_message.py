# SPDX-License-Identifier: Apache-2.0
"""A trajectory as a nav_msgs/Path."""

from __future__ import annotations

import math

import numpy as np
from geometry_msgs.msg import Point, Pose, PoseStamped, Quaternion
from nav_msgs.msg import Path
from std_msgs.msg import Header

from edgellm_ros.ros.messaging import NANOSECONDS, to_nanoseconds, to_time


def to_path(states: np.ndarray, dt: float, header: Header) -> Path:
    """Convert the states of a trajectory to poses, each with its own time.

    `states` [T+1, 4]: x, y, heading, speed; `dt`: seconds from one to the next.
    """
    start = to_nanoseconds(header.stamp)
    poses = []
    for step, (x, y, heading, _) in enumerate(states.tolist()):
        stamp = to_time(start + round(step * dt * NANOSECONDS))
        orientation = Quaternion(z=math.sin(heading / 2), w=math.cos(heading / 2))
        poses.append(
            PoseStamped(
                header=Header(stamp=stamp, frame_id=header.frame_id),
                pose=Pose(position=Point(x=x, y=y), orientation=orientation),
            )
        )
    return Path(header=header, poses=poses)
