# SPDX-License-Identifier: Apache-2.0
"""The frames' camera: ~/camera_info and /tf_static, or else parameters `camera.*`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rclpy.lifecycle import LifecycleNode
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from rclpy.serialization import deserialize_message
from sensor_msgs.msg import CameraInfo

from edgellm_ros.ros.messaging import overridable
from edgellm_ros.ros.node.camera.camera import Camera, CameraPose, camera_of
from edgellm_ros.ros.node.camera.camera_info import check_frame_id, to_intrinsics
from edgellm_ros.ros.node.camera.static_transforms import StaticTransforms
from edgellm_ros.ros.node.settings.live_parameters import LiveParameters

try:
    from tf2_msgs.msg import TFMessage
except ImportError:  # not on PyPI; part of every installed ROS
    TFMessage = None

CALIBRATION = QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)
TRANSFORMS = QoSProfile(depth=100, durability=DurabilityPolicy.TRANSIENT_LOCAL)
LOG_EVERY_S = 5.0


@dataclass(frozen=True, eq=False)
class FoundCamera:
    """A camera, and where its numbers come from, for /diagnostics."""

    camera: Camera
    intrinsics_from: str
    pose_from: str
    problem: str  # why an existing calibration is not used; empty if it is used or there is none


class CameraSource:
    """Subscriptions to ~/camera_info and /tf_static, until `close`.

    `find` may be called on any thread.
    """

    def __init__(self, node: LifecycleNode, parameters: LiveParameters) -> None:
        self._node = node
        self._parameters = parameters
        self._info = b""  # the newest message as it arrived; empty without one
        self._transforms = StaticTransforms()
        self._subscriptions: list[Any] = []

    def open(self) -> None:
        subscribe = self._node.create_subscription
        self._subscriptions = [
            # Raw: a message comes with every frame, and plans do not wait until its numbers are read.
            subscribe(CameraInfo, "~/camera_info", self._on_info, raw=True, **overridable(CALIBRATION))
        ]
        if TFMessage is not None:
            self._subscriptions.append(
                subscribe(TFMessage, "/tf_static", self._on_transforms, **overridable(TRANSFORMS))
            )

    def close(self) -> None:
        """Unsubscribe and forget the camera."""
        for subscription in self._subscriptions:
            self._node.destroy_subscription(subscription)
        self._subscriptions = []
        self._info = b""
        self._transforms.clear()

    def find(self, frame_id: str, size: tuple[int, int] | None) -> FoundCamera:
        """Return the camera of frames with this `frame_id`, width and height.

        `size`: width and height; None if they are not known.
        """
        parameters = self._parameters.current
        camera, serialized = camera_of(parameters.camera), self._info
        intrinsics, intrinsics_from, problem = camera.intrinsics, "parameters", ""
        if parameters.camera.source == "parameters":
            return FoundCamera(camera, intrinsics_from, "parameters", problem)
        if serialized:
            try:
                info = deserialize_message(serialized, CameraInfo)
                frame_id = frame_id or info.header.frame_id
                check_frame_id(info, frame_id)
                intrinsics = to_intrinsics(info, parameters.camera.rectified, size)
                intrinsics_from = "camera_info"
            except (RuntimeError, ValueError) as error:  # RuntimeError: not a CameraInfo
                problem = f"~/camera_info is not used: {error}"
        pose, pose_from = camera.pose, "parameters"
        matrix = self._transforms.find(parameters.frame_id, frame_id) if frame_id else None
        if matrix is not None:
            pose = CameraPose(matrix[:3, :3].T, matrix[:3, 3])
            pose_from = f"tf ({parameters.frame_id} to {frame_id})"
        elif TFMessage is None:
            pose_from = "parameters (tf2_msgs is not installed)"
        elif frame_id:
            pose_from = f"parameters (no static transforms from {parameters.frame_id} to {frame_id})"
        return FoundCamera(Camera(intrinsics, pose), intrinsics_from, pose_from, problem)

    def _on_info(self, serialized: bytes) -> None:
        self._info = serialized

    def _on_transforms(self, message: Any) -> None:
        for transform in message.transforms:
            try:
                self._transforms.add(transform)
            except ValueError as error:
                self._node.get_logger().warning(f"/tf_static: {error}", throttle_duration_sec=LOG_EVERY_S)
