# SPDX-License-Identifier: Apache-2.0
"""The other end of every topic, service and action of the node: what a robot and its people would do."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import rclpy
from diagnostic_msgs.msg import DiagnosticArray
from edgellm_ros.action import Plan
from edgellm_ros.msg import ActionChunk, AudioChunk, Generation
from edgellm_ros.srv import GetMetrics
from lifecycle_msgs.srv import ChangeState, GetState
from nav_msgs.msg import Odometry, Path
from rcl_interfaces.msg import Parameter, ParameterType, ParameterValue
from rcl_interfaces.srv import SetParameters
from rclpy.action import ActionClient
from rclpy.executors import SingleThreadedExecutor
from sensor_msgs.msg import CompressedImage, Image
from std_msgs.msg import String

from edgellm_ros.ros.messaging import action_services_qos

TIMEOUT_S = 30.0  # for whatever should happen at once; generous, for computers that are busy
RETRY_S = 3.0
OUTPUTS = {
    "utterance": AudioChunk,
    "generation": Generation,
    "text": String,
    "text_stream": String,
    "action_chunk": ActionChunk,
    "path": Path,
    "overlay": Image,
}


class RobotPeer:
    """One ROS node of the test's own process. Nothing arrives but while it waits."""

    def __init__(self, domain: int, image_type: Any = Image) -> None:
        self._context = rclpy.Context()
        rclpy.init(context=self._context, domain_id=domain)
        self.node = rclpy.create_node("peer", context=self._context)
        self._executor = SingleThreadedExecutor(context=self._context)
        self._executor.add_node(self.node)
        self.received: dict[str, list[Any]] = {name: [] for name in (*OUTPUTS, "diagnostics")}
        for name, message_type in OUTPUTS.items():
            callback = self.received[name].append
            self.node.create_subscription(message_type, f"/edgellm/{name}", callback, 100)
        self.node.create_subscription(
            DiagnosticArray, "/diagnostics", self.received["diagnostics"].append, 10
        )
        self._image = self.node.create_publisher(image_type, "/edgellm/image", 10)
        self._command = self.node.create_publisher(String, "/edgellm/command", 10)
        self._odom = self.node.create_publisher(Odometry, "/edgellm/odom", 10)
        self._audio = self.node.create_publisher(AudioChunk, "/edgellm/audio", 100)
        self._plan = ActionClient(self.node, Plan, "/edgellm/plan", **action_services_qos())
        self._clients: dict[str, Any] = {}

    def close(self) -> None:
        """Leave ROS."""
        self._executor.shutdown()
        self._plan.destroy()
        self.node.destroy_node()
        rclpy.shutdown(context=self._context)

    def wait(self, condition: Callable[[], Any], what: str, timeout_s: float = TIMEOUT_S) -> Any:
        """Let messages arrive until the condition holds; returns its value."""
        end = time.monotonic() + timeout_s
        while not (value := condition()):
            assert time.monotonic() < end, f"no {what} within {timeout_s} s"
            self._executor.spin_once(timeout_sec=0.05)
        return value

    def listen(self, seconds: float) -> None:
        """Let messages arrive for a while."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._executor.spin_once(timeout_sec=left)

    def clear(self) -> None:
        """Forget what was received."""
        for messages in self.received.values():
            messages.clear()

    def connect(self) -> None:
        """Wait until the node, which is active, hears us and we hear it."""
        topics = [f"/edgellm/{name}" for name in OUTPUTS]
        self.wait(
            lambda: all(self.node.count_publishers(topic) for topic in topics), "publishers of the node"
        )
        self.wait(self._plan.server_is_ready, "action server")
        # A publisher knows of a subscription before the subscription knows of the publisher. ~/command is the
        # last one that the node opens: when a command arrives, everything does.
        before = self.metrics()["commands_received"]

        def is_heard() -> bool:
            self.command("")
            return self.metrics()["commands_received"] > before

        self.wait(is_heard, "command that arrives")

    def metrics(self) -> Counter[str]:
        """What ~/get_metrics tells; counters that have not counted yet are 0."""
        response = self.call(GetMetrics, "get_metrics")
        assert response.success, response.message
        return Counter(dict(zip(response.names, response.values, strict=True)))

    def now(self) -> Any:
        """The time as a stamp."""
        return self.node.get_clock().now().to_msg()

    # Topics

    def command(self, text: str) -> None:
        """Say something on ~/command."""
        self._command.publish(String(data=text))

    def frame(self, pixels: np.ndarray, stamp: Any = None) -> Image:
        """Publish a camera frame; without a stamp it is taken now. Returns the message."""
        message = image_message(pixels, stamp or self.now())
        self._image.publish(message)
        return message

    def compressed_frame(self, data: bytes, file_format: str) -> None:
        """Publish a camera frame, taken now, that is an encoded file."""
        message = CompressedImage(format=file_format, data=data)
        message.header.stamp = self.now()
        self._image.publish(message)

    def odometry(
        self,
        x: float = 0.0,
        y: float = 0.0,
        heading: float = 0.0,
        speed: float = 0.0,
        stamp: Any = None,
        orientation_w: float | None = None,
    ) -> None:
        """Publish where the robot is."""
        message = Odometry()
        message.header.stamp = stamp or self.now()
        message.header.frame_id = "odom"
        message.pose.pose.position.x, message.pose.pose.position.y = float(x), float(y)
        message.pose.pose.orientation.z = math.sin(heading / 2)
        message.pose.pose.orientation.w = math.cos(heading / 2) if orientation_w is None else orientation_w
        message.twist.twist.linear.x = float(speed)
        self._odom.publish(message)

    def sound(self, data: bytes, stamp: Any = None, **fields: Any) -> AudioChunk:
        """Publish a piece of sound, 16 kHz S16LE mono unless `fields` say otherwise. Returns the message."""
        message = AudioChunk(**{"encoding": AudioChunk.S16LE, "sample_rate": 16000, **fields}, data=data)
        if stamp is not None:
            message.header.stamp = stamp
        self._audio.publish(message)
        return message

    def status(self, name: str) -> Any:
        """The next status of this name on /diagnostics."""
        self.received["diagnostics"].clear()
        statuses = self.wait(
            lambda: [
                s for a in self.received["diagnostics"] for s in a.status if s.name == f"/edgellm: {name}"
            ],
            f"diagnostics of {name}",
        )
        return statuses[0]

    # Services

    def call(self, service_type: Any, name: str, /, **request: Any) -> Any:
        """Call a service of the node and return its response.

        The first answer of a service may be lost, if the node has not discovered our end yet: a call without
        an answer is made again. No service minds but `change_state`, which is never the first to be called.
        """
        if name not in self._clients:
            self._clients[name] = self.node.create_client(service_type, f"/edgellm/{name}")
        client = self._clients[name]
        self.wait(client.service_is_ready, f"service {name}")
        futures: list[Any] = []
        next_try = 0.0

        def answered() -> list[Any]:
            nonlocal next_try
            if time.monotonic() >= next_try:
                futures.append(client.call_async(service_type.Request(**request)))
                next_try = time.monotonic() + (RETRY_S if name != "change_state" else TIMEOUT_S)
            return [future for future in futures if future.done()]

        return self.wait(answered, f"answer from {name}")[0].result()

    def transition(self, label: str) -> bool:
        """Ask for a lifecycle transition."""
        request = ChangeState.Request()
        request.transition.label = label
        return self.call(ChangeState, "change_state", transition=request.transition).success

    def state(self) -> str:
        """The lifecycle state."""
        return self.call(GetState, "get_state").current_state.label

    def set_parameter(self, name: str, value: bool | int | float | str | list[str]) -> Any:
        """Set one parameter; returns the node's verdict."""
        kinds = {
            bool: (ParameterType.PARAMETER_BOOL, "bool_value"),
            int: (ParameterType.PARAMETER_INTEGER, "integer_value"),
            float: (ParameterType.PARAMETER_DOUBLE, "double_value"),
            str: (ParameterType.PARAMETER_STRING, "string_value"),
            list: (ParameterType.PARAMETER_STRING_ARRAY, "string_array_value"),
        }
        kind, field = kinds[type(value)]
        parameter = Parameter(name=name, value=ParameterValue(type=kind, **{field: value}))
        return self.call(SetParameters, "set_parameters", parameters=[parameter]).results[0]

    # The action

    def send(self, goal: Plan.Goal) -> PlanCall:
        """Send a goal and wait until it is accepted or rejected."""
        self.wait(self._plan.server_is_ready, "action server")
        call = PlanCall(self)
        future = self._plan.send_goal_async(
            goal, feedback_callback=lambda m: call.feedback.append(m.feedback)
        )
        self.wait(future.done, "answer to the goal")
        call.handle = future.result()
        return call

    def plan(self, goal: Plan.Goal) -> Plan.Result:
        """Send a goal and wait for its result."""
        call = self.send(goal)
        assert call.handle.accepted, "the goal was rejected"
        return call.result()


class PlanCall:
    """A goal that was sent, its feedback so far, and its result."""

    def __init__(self, peer: RobotPeer) -> None:
        self._peer = peer
        self._result: Any = None
        self.handle: Any = None
        self.feedback: list[Plan.Feedback] = []

    @property
    def stages(self) -> list[str]:
        """Stages heard of, in their order, without repetition."""
        return list(dict.fromkeys(feedback.stage for feedback in self.feedback))

    def wait_for_stage(self, stage: str) -> None:
        """Wait for feedback from a stage."""
        self._peer.wait(lambda: stage in self.stages, f"feedback from the stage {stage!r}")

    def cancel(self) -> Any:
        """Ask to cancel it; returns the server's answer."""
        future = self.handle.cancel_goal_async()
        self._peer.wait(future.done, "answer to the cancel request")
        return future.result()

    def ask_for_result(self) -> Any:
        """The future of the result, asked for once."""
        if self._result is None:
            self._result = self.handle.get_result_async()
        return self._result

    def result(self) -> Plan.Result:
        """Wait for the result."""
        self._peer.wait(self.ask_for_result().done, "result")
        return self._result.result().result

    @property
    def status(self) -> int:
        """The goal's final status; after `result`."""
        return self._result.result().status


def image_message(pixels: np.ndarray, stamp: Any = None) -> Image:
    """A rgb8 message of an array [H, W, 3]; without a stamp it is of no particular time."""
    height, width, _ = pixels.shape
    message = Image(height=height, width=width, step=3 * width, encoding="rgb8", data=pixels.tobytes())
    message.header.frame_id = "camera"
    if stamp is not None:
        message.header.stamp = stamp
    return message
