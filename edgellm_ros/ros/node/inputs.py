# SPDX-License-Identifier: Apache-2.0
"""The topics that the node listens to. Callbacks only store and forward; the newest frame wins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nav_msgs.msg import Odometry
from rclpy.lifecycle import LifecycleNode
from rclpy.qos import HistoryPolicy, QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import CompressedImage, Image
from std_msgs.msg import String

from edgellm_ros.ros.node.command_trigger import Command, CommandTrigger
from edgellm_ros.ros.node.metrics import NodeMetrics
from edgellm_ros.ros.node.odometry import OdometryBuffer
from edgellm_ros.ros.node.parameters import Parameters
from edgellm_ros.ros.node.speech_input import Hearing, audio_type
from edgellm_ros.ros.node.worker import Job, PlanWorker

LOG_THROTTLE_S = 1.0
IMAGE_TYPES = {"raw": Image, "compressed": CompressedImage}
RELIABILITIES = {"best_effort": ReliabilityPolicy.BEST_EFFORT, "reliable": ReliabilityPolicy.RELIABLE}


class Inputs:
    """~/image, ~/odom, ~/command and ~/audio, from `open` to `close`.

    `make_job(command, frame)` makes the worker's job of a command and the frame that it is planned with.
    """

    def __init__(
        self,
        node: LifecycleNode,
        worker: PlanWorker,
        odometry: OdometryBuffer,
        trigger: CommandTrigger,
        metrics: NodeMetrics,
        hearing: Hearing,
        make_job: Callable[[Command, Any], Job],
    ) -> None:
        self._node = node
        self._worker = worker
        self._odometry = odometry
        self._trigger = trigger
        self._metrics = metrics
        self._hearing = hearing
        self._make_job = make_job
        self._subscriptions: list[Any] = []

    def open(self, parameters: Parameters) -> None:
        """Subscribe. Best effort also receives from a publisher that is reliable, the reverse is not true."""
        for message_type, topic, callback, depth in (
            (IMAGE_TYPES[parameters.image_transport], "~/image", self._on_image, 1),
            (Odometry, "~/odom", self._on_odometry, 50),
            (audio_type(parameters.audio_transport), "~/audio", self._on_audio, 100),
            (String, "~/command", self._on_command, 10),
        ):
            qos = QoSProfile(
                reliability=RELIABILITIES[parameters.input_reliability],
                history=HistoryPolicy.KEEP_LAST,
                depth=depth,
            )
            self._subscriptions.append(self._node.create_subscription(message_type, topic, callback, qos))

    @property
    def connected(self) -> int:
        """Topics with a publisher that is heard."""
        return sum(subscription.get_publisher_count() > 0 for subscription in self._subscriptions)

    def close(self) -> None:
        """Unsubscribe, and forget what came: after a pause it would be out of date."""
        for subscription in self._subscriptions:
            self._node.destroy_subscription(subscription)
        self._subscriptions = []
        self._trigger.clear()
        self._odometry.clear()
        self._hearing.clear()

    def _on_image(self, message: Image | CompressedImage) -> None:
        self._metrics.frames.tick()
        self._metrics.count("frames_received")
        commands = self._hearing.on_stamp(message.header)
        if commands:  # what was said is planned with this frame
            self._trigger.frame = message
            self._obey(commands)
            return
        pair = self._trigger.on_frame(message)
        if pair is not None and self._worker.submit_topic(self._make_job(*pair), preempt=False):
            self._metrics.count("frames_dropped")

    def _on_odometry(self, message: Odometry) -> None:
        self._metrics.odometry.tick()
        self._metrics.count("odometry_received")
        try:
            self._odometry.add(message)
        except ValueError as error:
            self._metrics.count("odometry_refused")
            self._node.get_logger().error(f"~/odom: {error}", throttle_duration_sec=LOG_THROTTLE_S)

    def _on_command(self, message: String) -> None:
        self._metrics.count("commands_received")
        self._obey([Command(message.data.strip())])

    def _on_audio(self, message: Any) -> None:
        self._obey(self._hearing.on_message(message))

    def _obey(self, commands: list[Command]) -> None:
        for command in commands:
            if not self._trigger.is_new(command):
                continue
            pair = self._trigger.on_command(command)
            if pair is not None:
                self._worker.submit_topic(self._make_job(*pair), preempt=True)
            else:
                self._worker.stop_topic("a newer command arrived" if command else "the command was withdrawn")
