# SPDX-License-Identifier: Apache-2.0
"""Output topics of the node."""

from __future__ import annotations

from typing import Any

from nav_msgs.msg import Path
from rclpy.lifecycle import LifecycleNode
from rclpy.qos import QoSProfile
from sensor_msgs.msg import Image
from std_msgs.msg import Header, String
from visualization_msgs.msg import MarkerArray

from edgellm_ros.msg import ActionChunk, AudioChunk, Generation, Transcript
from edgellm_ros.ros.messaging import overridable
from edgellm_ros.ros.node.camera.camera_source import CameraSource
from edgellm_ros.ros.node.metrics import NodeMetrics
from edgellm_ros.ros.node.outputs.answer_stream import AnswerStream
from edgellm_ros.ros.node.outputs.display import Display
from edgellm_ros.ros.node.outputs.markers import clear_markers, make_markers
from edgellm_ros.ros.node.outputs.overlay import draw_paths
from edgellm_ros.ros.node.plan import Plan
from edgellm_ros.ros.node.sensors.images import encode_image
from edgellm_ros.ros.node.settings.live_parameters import LiveParameters

RELIABLE = QoSProfile(depth=10)  # serves reliable and best-effort subscriptions
TOPICS: dict[str, tuple[type, QoSProfile]] = {
    "utterance": (AudioChunk, RELIABLE),
    "transcript": (Transcript, RELIABLE),
    "generation": (Generation, RELIABLE),
    "text": (String, RELIABLE),
    # Deep enough for a slow reader to get all pieces of a long answer.
    "text_stream": (String, QoSProfile(depth=100)),
    "speech": (AudioChunk, QoSProfile(depth=100)),  # 10 s
    "action_chunk": (ActionChunk, RELIABLE),
    "path": (Path, RELIABLE),
    "markers": (MarkerArray, RELIABLE),
    "overlay": (Image, QoSProfile(depth=1)),
}


class Outputs:
    """Lifecycle publishers, silent while the node is not active.

    May be used from any thread; plans are published one at a time. Every message is counted:
    `generation_published` and so on. What people look at (path, markers, overlay) leaves from a thread of
    its own (`Display`).
    """

    def __init__(
        self, node: LifecycleNode, parameters: LiveParameters, camera: CameraSource, metrics: NodeMetrics
    ) -> None:
        self._node = node
        self._parameters = parameters
        self._camera = camera
        self._metrics = metrics
        self._publishers = {
            name: node.create_lifecycle_publisher(message_type, f"~/{name}", **overridable(qos))
            for name, (message_type, qos) in TOPICS.items()
        }
        self._display = Display(self._show, node.get_logger())
        self._stream = AnswerStream(lambda piece: self._publish("text_stream", String(data=piece)))

    @property
    def pending(self) -> int:
        """Number of published plans whose path, markers and overlay have not left."""
        return self._display.pending

    @property
    def connected(self) -> int:
        """Number of topics with a subscription."""
        return sum(self._is_heard(name) for name in TOPICS)

    def publish_actions(self, plan: Plan) -> None:
        """Publish the trajectories of a completed plan, which a robot waits for."""
        for chunk in plan.action_chunks:
            self._publish("action_chunk", chunk)

    def publish(self, plan: Plan) -> None:
        """Publish the rest of a completed plan: words at once, then what people see.

        Markers and overlay are made while someone subscribes. They show the newest plan: while plans end
        faster than these are made, those between are left out.
        """
        self._publish("generation", plan.generation)
        self._publish("text", String(data=plan.generation.text))
        self._display.add(plan)

    def flush(self) -> None:
        """Wait until everything of the published plans has left."""
        self._display.flush()

    def end(self) -> None:
        """End the thread, after what is left of the published plans."""
        self._display.close()

    def clear_markers(self) -> None:
        """Remove the markers of all plans."""
        now = self._node.get_clock().now().to_msg()
        base = Header(stamp=now, frame_id=self._parameters.current.frame_id)
        self._publishers["markers"].publish(clear_markers(base))

    def publish_utterance(self, utterance: AudioChunk) -> None:
        """Publish an utterance with the samples of the model's input."""
        self._publish("utterance", utterance)

    def publish_transcript(self, transcript: Transcript) -> None:
        """Publish what the speech engine heard."""
        self._publish("transcript", transcript)

    def publish_speech(self, chunk: AudioChunk) -> None:
        """Publish the next chunk of the robot's voice; one without data = silence."""
        self._publish("speech", chunk)

    def stream(self, answer: object, piece: str) -> None:
        """Publish the next piece of an unfinished answer, after those of earlier answers."""
        self._stream.add(answer, piece)

    def end_stream(self, answer: object) -> None:
        """End the pieces of an answer, if it had any."""
        self._stream.end(answer)

    def destroy(self) -> None:
        """End, and remove the topics."""
        self.end()
        for publisher in self._publishers.values():
            self._node.destroy_lifecycle_publisher(publisher)

    def _show(self, plan: Plan, is_newest: bool) -> None:
        for path in plan.paths:
            self._publish("path", path)
        if is_newest and self._is_heard("markers"):
            settings = self._parameters.current.markers
            self._publish("markers", make_markers(plan.generation.text, plan.paths, plan.base, settings))
        if is_newest and plan.frame is not None and self._is_heard("overlay"):
            height, width, _ = plan.frame.shape
            camera = self._camera.find(plan.generation.header.frame_id, (width, height)).camera
            drawn = draw_paths(plan.frame, [] if plan.states is None else plan.states, camera)
            self._publish("overlay", encode_image(drawn, plan.generation.header))

    def _publish(self, name: str, message: Any) -> None:
        self._publishers[name].publish(message)
        self._metrics.count(f"{name}_published")

    def _is_heard(self, name: str) -> bool:
        return self._publishers[name].get_subscription_count() > 0
