# SPDX-License-Identifier: Apache-2.0
"""Input topics of the node.

Callbacks store and forward messages: of each camera the newest frame, and those that a plan with several
frames needs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from nav_msgs.msg import Odometry
from rclpy.lifecycle import LifecycleNode
from rclpy.qos import HistoryPolicy, QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import CompressedImage, Image, JointState
from std_msgs.msg import String

from edgellm_ros.ros.messaging import overridable
from edgellm_ros.ros.node.listener import Listener
from edgellm_ros.ros.node.metrics import NodeMetrics, Rate, RecentProblem
from edgellm_ros.ros.node.planning.command_trigger import Command, CommandTrigger, Pair
from edgellm_ros.ros.node.planning.jobs import JobFactory
from edgellm_ros.ros.node.sensors.cameras import Cameras
from edgellm_ros.ros.node.sensors.frame_history import FrameHistory
from edgellm_ros.ros.node.sensors.input_time import Frame, StaleInputError, check_not_future
from edgellm_ros.ros.node.sensors.joint_states import JointStates
from edgellm_ros.ros.node.sensors.odometry import OdometryBuffer
from edgellm_ros.ros.node.sensors.sample_buffer import SampleBuffer
from edgellm_ros.ros.node.settings.live_parameters import LiveParameters
from edgellm_ros.ros.node.speech_input import SpeechInput, audio_type
from edgellm_ros.ros.node.worker.worker import PlanWorker

LOG_THROTTLE_S = 1.0
IMAGE_TYPES = {"raw": Image, "compressed": CompressedImage}
RELIABILITIES = {"best_effort": ReliabilityPolicy.BEST_EFFORT, "reliable": ReliabilityPolicy.RELIABLE}


class Inputs:
    """Subscriptions to ~/image, ~/odom, ~/command and ~/audio, until `close`.

    For a policy also to its further cameras and ~/joint_states.
    """

    def __init__(
        self,
        node: LifecycleNode,
        parameters: LiveParameters,
        *,
        worker: PlanWorker,
        jobs: JobFactory,
        odometry: OdometryBuffer,
        trigger: CommandTrigger,
        frames: FrameHistory,
        cameras: Cameras,
        joints: JointStates,
        speech: SpeechInput,
        metrics: NodeMetrics,
        blind: str = "",
        listener: Listener | None = None,
    ) -> None:
        """Take what the callbacks fill, and start the listener.

        blind: why the engine takes no frames, which are counted and refused then; empty = it takes them.
        """
        self._listener = listener
        if listener is not None:
            listener.start(self._on_heard)
        self._blind = blind
        self._node = node
        self._parameters = parameters
        self._worker = worker
        self._odometry = odometry
        self._trigger = trigger
        self._frames = frames
        self._cameras = cameras
        self._joints = joints
        self._jobs = jobs
        self._speech = speech
        self._metrics = metrics
        self._image_problem = RecentProblem()
        self._subscriptions: list[Any] = []

    def open(self) -> None:
        """Subscribe to all input topics."""
        parameters = self._parameters.current
        image_type = IMAGE_TYPES[parameters.image_transport]
        of_policies: list[tuple[Any, str, Any, int]] = []
        if self._cameras.names:
            of_policies.append((JointState, "~/joint_states", self._on_joint_state, 50))
            for name, topic in self._cameras.topics.items():
                of_policies.append((image_type, topic, partial(self._on_further_image, name, topic), 1))
        for message_type, topic, callback, depth in (
            *of_policies,
            (image_type, "~/image", self._on_image, 1),
            (Odometry, "~/odom", self._on_odometry, 50),
            (audio_type(parameters.audio_transport), "~/audio", self._on_audio, 100),
            (String, "~/command", self._on_command, 10),
        ):
            qos = QoSProfile(
                reliability=RELIABILITIES[parameters.input_reliability],
                history=HistoryPolicy.KEEP_LAST,
                depth=depth,
            )
            self._subscriptions.append(
                self._node.create_subscription(message_type, topic, callback, **overridable(qos))
            )

    @property
    def connected(self) -> int:
        """Number of topics with a publisher."""
        return sum(subscription.get_publisher_count() > 0 for subscription in self._subscriptions)

    @property
    def image_problem(self) -> str:
        """The reason why the latest frame was refused; empty after a few seconds."""
        return self._image_problem.text

    def close(self) -> None:
        """Unsubscribe, and drop all input, which would be stale after a pause."""
        for subscription in self._subscriptions:
            self._node.destroy_subscription(subscription)
        self._subscriptions = []
        self._trigger.clear()
        self._frames.clear()
        self._cameras.clear()
        self._odometry.clear()
        self._joints.clear()
        self._speech.clear()
        self._image_problem.clear()

    def _on_image(self, message: Image | CompressedImage) -> None:
        frame = self._accept("~/image", "frames", message)
        if frame is None:
            self._trigger.refused = self._image_problem.text
            return
        self._metrics.frames.tick()
        self._frames.add(frame, self._parameters.current.frame_interval)
        self._cameras.add_first(frame)
        commands = self._speech.on_stamp(message.header)
        if commands:  # utterances that this frame ends are planned with it
            self._trigger.frame, self._trigger.refused = frame, ""
            self._obey(commands)
            return
        self._trigger.plan_on = self._parameters.current.plan_on
        pair = self._trigger.on_frame(frame)
        if pair is not None:
            self._plan(pair)

    def _on_further_image(self, name: str, topic: str, message: Image | CompressedImage) -> None:
        frame = self._accept(topic, "further_frames", message)
        if frame is None:
            self._cameras.refuse(name, self._image_problem.text)
        else:
            self._cameras.add(name, frame)

    def _accept(self, topic: str, counter: str, message: Image | CompressedImage) -> Frame | None:
        """Return a camera frame with its arrival; None if it is refused."""
        self._metrics.count(f"{counter}_received")
        frame = Frame(message, arrival=self._node.get_clock().now().nanoseconds)
        parameters = self._parameters.current
        try:
            if self._blind:
                raise ValueError(f"{self._blind}: frames are ignored")
            parameters.limits.check_data("the camera frame", [message.data])
            check_not_future("the camera frame", frame.time, frame.arrival, parameters.future_stamp_tolerance)
        except (StaleInputError, ValueError) as error:
            self._metrics.count(f"{counter}_refused")
            self._image_problem.set(f"{topic}: {error}")
            self._node.get_logger().error(f"{topic}: {error}", throttle_duration_sec=LOG_THROTTLE_S)
            return None
        return frame

    def _on_odometry(self, message: Odometry) -> None:
        self._metrics.count("odometry_received")
        self._store(message, self._odometry, "~/odom", "odometry", self._metrics.odometry)

    def _on_joint_state(self, message: JointState) -> None:
        self._metrics.count("joint_states_received")
        if self._joints.is_complete(message):
            self._store(message, self._joints, "~/joint_states", "joint_states", self._metrics.joint_states)
        else:
            self._metrics.count("joint_states_incomplete")

    def _store(self, message: Any, buffer: SampleBuffer, topic: str, counter: str, rate: Rate) -> None:
        was_good = not buffer.problem
        arrival = self._node.get_clock().now().nanoseconds
        try:
            buffer.add(message, arrival, self._parameters.current.future_stamp_tolerance)
        except ValueError as error:
            self._metrics.count(f"{counter}_refused")
            if was_good:  # log the first bad message of a series
                self._node.get_logger().error(f"{topic}: {error}", throttle_duration_sec=LOG_THROTTLE_S)
            return
        rate.tick()

    def _on_command(self, message: String) -> None:
        self._metrics.count("commands_received")
        try:
            self._parameters.current.limits.check_text("the command", [message.data])
        except ValueError as error:
            self._metrics.count("commands_refused")
            self._node.get_logger().error(f"~/command: {error}", throttle_duration_sec=LOG_THROTTLE_S)
            return
        self._obey([Command(message.data.strip())])

    def _on_heard(self) -> None:
        if self._listener is not None:
            self._obey(self._listener.take())

    def _on_audio(self, message: Any) -> None:
        self._obey(self._speech.on_message(message))

    def _obey(self, commands: list[Command]) -> None:
        self._trigger.plan_on = self._parameters.current.plan_on
        for command in commands:
            if not self._trigger.is_new(command):
                continue
            self._speech.silence_robot()
            pair = self._trigger.on_command(command)
            if pair is not None:
                self._plan(pair)
            else:
                self._worker.stop_topic("a newer command arrived" if command else "the command was withdrawn")

    def _plan(self, pair: Pair) -> None:
        """Submit the plan of a pair: a command's first one as a command, others as frames."""
        job = self._jobs.from_command(pair.command, pair.frame)
        self._worker.submit_topic(job, preempt=pair.is_first)
