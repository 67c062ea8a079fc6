# SPDX-License-Identifier: Apache-2.0
"""The topics that the node publishes on."""

from __future__ import annotations

from rclpy.lifecycle import LifecycleNode
from rclpy.qos import QoSProfile
from sensor_msgs.msg import Image
from std_msgs.msg import String

from edgellm_ros.msg import ActionChunk, Generation
from edgellm_ros.ros.images import encode_image
from edgellm_ros.ros.overlay import OverlayCamera, draw_paths
from edgellm_ros.ros.planner import Path, Plan


class Outputs:
    """Managed publishers: they are silent while the node is not active. Usable from the planning thread."""

    def __init__(self, node: LifecycleNode) -> None:
        self._node = node
        reliable = QoSProfile(depth=10)  # a subscription of either reliability receives from it
        self._generation = node.create_lifecycle_publisher(Generation, "~/generation", reliable)
        self._text = node.create_lifecycle_publisher(String, "~/text", reliable)
        # A long answer's pieces must not overwrite each other before a slow reader takes them.
        self._text_stream = node.create_lifecycle_publisher(String, "~/text_stream", QoSProfile(depth=100))
        self._action_chunk = node.create_lifecycle_publisher(ActionChunk, "~/action_chunk", reliable)
        self._path = node.create_lifecycle_publisher(Path, "~/path", reliable)
        self._overlay = node.create_lifecycle_publisher(Image, "~/overlay", QoSProfile(depth=1))

    def publish(self, plan: Plan, camera: OverlayCamera) -> None:
        """Publish a completed plan: first what moves the robot, last what only people look at."""
        for chunk in plan.action_chunks:
            self._action_chunk.publish(chunk)
        self._generation.publish(plan.generation)
        self._text.publish(String(data=plan.generation.text))
        for path in plan.paths:
            self._path.publish(path)
        if plan.frame is not None and self._overlay.get_subscription_count():
            drawn = draw_paths(plan.frame, [] if plan.states is None else plan.states, camera)
            self._overlay.publish(encode_image(drawn, plan.generation.header))

    def stream(self, piece: str) -> None:
        """Publish a piece of an answer that is still being made."""
        self._text_stream.publish(String(data=piece))

    def destroy(self) -> None:
        """Take the topics down."""
        for publisher in (
            self._generation, self._text, self._text_stream, self._action_chunk, self._path, self._overlay,
        ):  # fmt: skip
            self._node.destroy_lifecycle_publisher(publisher)
