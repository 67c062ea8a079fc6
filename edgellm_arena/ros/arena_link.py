# SPDX-License-Identifier: Apache-2.0
"""Topics and services that the arena shares with the edgellm node.

    clock, edgellm/odom, edgellm/command, edgellm/image            -> edgellm node
    edgellm/camera_info, /tf_static, /tf                           -> edgellm node, viewers
    edgellm/text_stream, edgellm/generation, edgellm/action_chunk  <- edgellm node
    edgellm/set_noise_seed, edgellm/get_state                      services of the edgellm node

`Microphone` (microphone.py) adds edgellm/audio.

Names are relative: remap them, or give both nodes one namespace. Everything runs on the caller's thread:
methods that wait spin the node.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from edgellm_ros.msg import ActionChunk, Generation
from edgellm_ros.srv import SetNoiseSeed
from lifecycle_msgs.msg import State as LifecycleState
from lifecycle_msgs.srv import GetState
from nav_msgs.msg import Odometry
from numpy.typing import NDArray
from rclpy.client import Client
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile, qos_profile_sensor_data
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import CameraInfo, Image
from std_msgs.msg import String

from edgellm_arena.episodes.closed_loop import Plan
from edgellm_arena.ros.camera_messages import (
    BASE_FRAME,
    CAMERA_FRAME,
    ODOM_FRAME,
    camera_transform,
    robot_transform,
    to_camera_info,
)
from edgellm_arena.world.camera import CAMERA
from edgellm_arena.world.unicycle import DT, State
from edgellm_ros.echo import quoted
from edgellm_ros.ros.executor import LeanExecutor
from edgellm_ros.ros.messaging import spin_until, to_nanoseconds, to_time

try:
    from tf2_msgs.msg import TFMessage
except ImportError:  # not on PyPI; part of every installed ROS
    TFMessage = None

RELIABLE = QoSProfile(depth=50)
SETTLE_S = 0.02
COLUMNS = ("acceleration", "curvature")
STAGES = ("vision", "audio", "prefill", "decode", "action")  # of a plan in the runtime
PARTS = (*STAGES, "node", "topics")  # of `Timing.plan_s`
STATIC = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)


class LinkError(RuntimeError):
    """An edgellm node that is missing, not active or silent, or an invalid answer."""


@dataclass(frozen=True)
class Timing:
    """Durations of one plan in seconds."""

    first_words_s: float  # from the frame's publication to the first text, by this computer's clock
    plan_s: float  # to the whole answer; the sum of the following
    vision_s: float  # of each stage, as measured by the node
    audio_s: float
    prefill_s: float
    decode_s: float
    action_s: float
    node_s: float  # of the node besides these, from the arrival of the frame to the answer
    topics_s: float  # outside of the node's plan: messages on their way, and executors


class ArenaLink(Node):
    """A node named `arena`. Stamps are simulated time in nanoseconds."""

    def __init__(self) -> None:
        super().__init__("arena")
        self._time = self.create_publisher(Clock, "/clock", RELIABLE)
        self._odometry = self.create_publisher(Odometry, "edgellm/odom", RELIABLE)
        self._command = self.create_publisher(String, "edgellm/command", RELIABLE)
        self._image = self.create_publisher(Image, "edgellm/image", QoSProfile(depth=5))
        self._camera_info = self.create_publisher(CameraInfo, "edgellm/camera_info", QoSProfile(depth=5))
        self._transforms = None if TFMessage is None else self.create_publisher(TFMessage, "/tf", RELIABLE)
        if TFMessage is not None:
            self._static = self.create_publisher(TFMessage, "/tf_static", STATIC)
            self._static.publish(TFMessage(transforms=[camera_transform(CAMERA)]))
        self.needed = [self._odometry, self._command, self._image]  # publishers that need a subscription
        self._seed_client = self.create_client(SetNoiseSeed, "edgellm/set_noise_seed")
        self.node_name = self.resolve_service_name("edgellm/get_state").removesuffix("/get_state")
        self._state_client = self.create_client(GetState, "edgellm/get_state")
        self.create_subscription(ActionChunk, "edgellm/action_chunk", self._on_chunk, RELIABLE)
        self.create_subscription(Generation, "edgellm/generation", self._on_generation, RELIABLE)
        self.create_subscription(String, "edgellm/text_stream", self._on_text, qos_profile_sensor_data)
        self._executor = LeanExecutor()
        self._executor.add_node(self)
        self._reset()

    def destroy_node(self) -> None:
        """Stop spinning and free all resources."""
        self._executor.shutdown()
        super().destroy_node()

    # Publishing

    def publish_state(self, stamp: int, state: State, yaw_rate: float) -> None:
        """Set the clock to `stamp` and publish the robot's state (REP 103, 105).

        `yaw_rate` in rad/s.
        """
        self.publish_clock(stamp)
        message = Odometry(child_frame_id=BASE_FRAME)
        message.header.stamp, message.header.frame_id = to_time(stamp), ODOM_FRAME
        message.pose.pose.position.x, message.pose.pose.position.y = state.x, state.y
        message.pose.pose.orientation.z = math.sin(state.heading / 2)
        message.pose.pose.orientation.w = math.cos(state.heading / 2)
        message.twist.twist.linear.x = state.speed
        message.twist.twist.angular.z = yaw_rate
        self._odometry.publish(message)
        if self._transforms is not None:
            self._transforms.publish(TFMessage(transforms=[robot_transform(stamp, state)]))

    def publish_clock(self, stamp: int) -> None:
        """Set the clock to `stamp`."""
        self._time.publish(Clock(clock=to_time(stamp)))

    def say(self, command: str) -> None:
        """Send a command; an empty one ends the previous command."""
        self._command.publish(String(data=command))

    def ask(
        self,
        stamp: int,
        frame: NDArray[np.uint8],
        resend_after_s: float,
        attempts: int,
        command: str | None = None,
    ) -> tuple[Plan, Timing]:
        """Send the frame [H, W, 3] RGB of time `stamp` and wait for the answer to it.

        A new `command` is sent after its frame, so that the node does not plan it with the previous frame.
        Best-effort QoS may lose a frame: it is sent again after `resend_after_s` without any message, up to
        `attempts` times; then LinkError is raised.
        """
        self._settle()
        message, camera_info = to_image(stamp, frame), to_camera_info(stamp, CAMERA)
        self._reset(stamp)
        start = time.perf_counter()
        for attempt in range(attempts):
            self._image.publish(message)
            self._camera_info.publish(camera_info)
            if command is not None and attempt == 0:
                self._settle()
                start = time.perf_counter()
                self.say(command)
            while True:
                heard = self._heard
                if self.spin_until(self._answered, resend_after_s):
                    return self._plan(start)
                if self._heard == heard:
                    break
        raise LinkError(
            f"no answer from {self.node_name} to the frame of "
            f"t = {stamp * 1e-9:.1f} s, sent {attempts} times in {time.perf_counter() - start:.0f} s"
        )

    # Waiting

    def wait_until_active(self, timeout_s: float) -> None:
        """Wait until the edgellm node is active and connected.

        Raises LinkError with the reason if not.
        """
        deadline = time.monotonic() + timeout_s
        state = "not there"
        while time.monotonic() < deadline:
            if self._state_client.wait_for_service(timeout_sec=0.2):
                current = self._call(self._state_client, GetState.Request(), 2.0)
                if current is not None:
                    state = current.current_state.label
                    if current.current_state.id == LifecycleState.PRIMARY_STATE_ACTIVE and self._connected():
                        return
            self.spin_until(lambda: False, 0.05)
        raise LinkError(f"{self.node_name} is {state} after {timeout_s:.0f} s")

    def set_noise_seed(self, seed: int) -> None:
        """Set the seed of the following trajectories.

        Raises LinkError if the node refuses it.
        """
        response = self.call(self._seed_client, SetNoiseSeed.Request(seed=seed))
        if not response.success:
            raise LinkError(f"{self._seed_client.srv_name}: {response.message}")

    def call(self, client: Client, request: Any) -> Any:
        """Call a service of the edgellm node and return its response.

        The request is repeated, because the first response is lost if the node has not discovered the client.
        Raises LinkError without a response.
        """
        for _ in range(5):
            response = self._call(client, request, 3.0)
            if response is not None:
                return response
        raise LinkError(f"{client.srv_name}: no response")

    def spin_until(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Receive messages until `done()` or for `timeout_s`; return `done()`."""
        return spin_until(self._executor, done, timeout_s)

    def _settle(self) -> None:
        """Wait for published messages to arrive before messages on another topic are sent."""
        self.spin_until(lambda: False, SETTLE_S)

    def _call(self, client, request, timeout_s: float):
        """Return the response; None if none arrives in time."""
        future = client.call_async(request)
        if self.spin_until(future.done, timeout_s):
            return future.result()
        client.remove_pending_request(future)
        return None

    def _connected(self) -> bool:
        listeners = [publisher.get_subscription_count() for publisher in self.needed]
        talkers = [self.count_publishers(f"edgellm/{name}") for name in ("action_chunk", "generation")]
        return min(listeners + talkers) > 0

    # Receiving

    def _reset(self, stamp: int | None = None) -> None:
        self._stamp = stamp
        self._heard = 0
        self._first_words: float | None = None
        self._generation: Generation | None = None
        self._chunks: dict[int, ActionChunk] = {}

    def _on_text(self, message: String) -> None:
        self._heard += 1
        if self._first_words is None and message.data:
            self._first_words = time.perf_counter()

    def _on_generation(self, message: Generation) -> None:
        if to_nanoseconds(message.header.stamp) == self._stamp:
            self._heard += 1
            self._generation = message

    def _on_chunk(self, message: ActionChunk) -> None:
        if to_nanoseconds(message.header.stamp) == self._stamp:
            self._heard += 1
            self._chunks[message.sample_index] = message

    def _answered(self) -> bool:
        """Tell whether the answer and all its trajectories have arrived."""
        return self._generation is not None and len(self._chunks) >= self._generation.action_chunk_count

    def _plan(self, start: float) -> tuple[Plan, Timing]:
        now = time.perf_counter()
        generation = self._generation
        stages = {f"{stage}_s": getattr(generation, f"{stage}_latency") for stage in STAGES}
        timing = Timing(
            first_words_s=(self._first_words or now) - start,
            plan_s=now - start,
            **stages,
            node_s=generation.total_latency - sum(stages.values()),
            topics_s=now - start - generation.total_latency,
        )
        samples = [to_actions(self._chunks[index]) for index in sorted(self._chunks)]
        if not samples:
            return Plan(generation.text, None), timing
        return Plan(generation.text, samples[0], np.stack(samples[1:]) if len(samples) > 1 else None), timing


def to_image(stamp: int, frame: NDArray[np.uint8]) -> Image:
    """Convert an RGB frame [H, W, 3] to an image message."""
    height, width, _ = frame.shape
    message = Image(
        height=height, width=width, encoding="rgb8", is_bigendian=0, step=3 * width, data=frame.tobytes()
    )
    message.header.stamp, message.header.frame_id = to_time(stamp), CAMERA_FRAME
    return message


def to_actions(chunk: ActionChunk) -> NDArray[np.float64]:
    """Return the actions of a chunk [T, 2] (m/s^2, 1/m).

    The columns are in the order of COLUMNS, in any order of the message. Raises LinkError for a chunk that
    does not fit this robot.
    """
    names = list(chunk.names)
    if any(name not in names for name in COLUMNS) or abs(chunk.dt - DT) > 1e-6:
        raise LinkError(
            f"a chunk of {quoted(names)} every {chunk.dt} s: this robot takes {', '.join(COLUMNS)} "
            f"every {DT} s"
        )
    values = np.asarray(chunk.values, np.float64)
    if values.size != chunk.horizon * len(names) or not np.isfinite(values).all():
        raise LinkError(f"a chunk of {values.size} values for {chunk.horizon} x {len(names)}, or not finite")
    return values.reshape(chunk.horizon, len(names))[:, [names.index(name) for name in COLUMNS]]
