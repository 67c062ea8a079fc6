# SPDX-License-Identifier: Apache-2.0
"""The arena's camera and robot for other nodes: calibration and transforms.

The transforms are between frames of REP 105.
"""

from __future__ import annotations

import math

import numpy as np
from geometry_msgs.msg import Quaternion, TransformStamped, Vector3
from sensor_msgs.msg import CameraInfo

from edgellm_arena.world.camera import Camera
from edgellm_arena.world.unicycle import State
from edgellm_ros.ros.messaging import to_time

ODOM_FRAME, BASE_FRAME, CAMERA_FRAME = "odom", "base_link", "camera"


def to_camera_info(stamp: int, camera: Camera) -> CameraInfo:
    """Return the calibration of the frame of time `stamp` (ns).

    In ROS the centre of the first pixel is (0, 0), in the arena (0.5, 0.5).
    """
    focal, cx, cy = camera.focal, camera.width / 2 - 0.5, camera.height / 2 - 0.5
    message = CameraInfo(
        width=camera.width,
        height=camera.height,
        distortion_model="plumb_bob",
        d=[0.0] * 5,
        k=[focal, 0.0, cx, 0.0, focal, cy, 0.0, 0.0, 1.0],
        r=[1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0],
        p=[focal, 0.0, cx, 0.0, 0.0, focal, cy, 0.0, 0.0, 0.0, 1.0, 0.0],
    )
    message.header.stamp, message.header.frame_id = to_time(stamp), CAMERA_FRAME
    return message


def camera_transform(camera: Camera) -> TransformStamped:
    """Return the pose of the camera (x right, y down, z ahead) in the robot's base."""
    message = TransformStamped(child_frame_id=CAMERA_FRAME)
    message.header.frame_id = BASE_FRAME
    message.transform.translation = Vector3(x=camera.x, z=camera.z)
    message.transform.rotation = to_quaternion(camera.axes.T)
    return message


def robot_transform(stamp: int, state: State) -> TransformStamped:
    """Return the pose of the robot's base in the odometry frame at time `stamp` (ns)."""
    message = TransformStamped(child_frame_id=BASE_FRAME)
    message.header.stamp, message.header.frame_id = to_time(stamp), ODOM_FRAME
    message.transform.translation = Vector3(x=state.x, y=state.y)
    message.transform.rotation = Quaternion(z=math.sin(state.heading / 2), w=math.cos(state.heading / 2))
    return message


def to_quaternion(rotation: np.ndarray) -> Quaternion:
    """Return the quaternion of a rotation matrix [3, 3] of less than 180 degrees."""
    w = math.sqrt(max(0.0, 1.0 + np.trace(rotation))) / 2
    x, y, z = (rotation[[2, 0, 1], [1, 2, 0]] - rotation[[1, 2, 0], [2, 0, 1]]) / (4 * w)
    return Quaternion(x=float(x), y=float(y), z=float(z), w=w)
