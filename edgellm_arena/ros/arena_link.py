# SPDX-License-Identifier: Apache-2.0
"""Topics and services that the arena shares with the edgellm node.

    clock, edgellm/odom, edgellm/command, edgellm/image            -> edgellm node
    edgellm/camera_info, /tf_static, /tf                           -> edgellm node, viewers
    edgellm/text_stream, edgellm/generation, edgellm/action_chunk  <- edgellm node
    edgellm/set_noise_seed, edgellm/get_state                      services of the edgellm node

`Microphone` (microphone.py) adds edgellm/audio.

WorldLink has the clock, the command and the services.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
from edgellm_ros.msg import ActionChunk, Generation
from nav_msgs.msg import Odometry
from numpy.typing import NDArray
from rclpy.qos import DurabilityPolicy, QoSProfile, qos_profile_sensor_data
from sensor_msgs.msg import CameraInfo, Image
from std_msgs.msg import Header, String

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
from edgellm_ros.ros.messaging import to_nanoseconds, to_time
from edgellm_ros.ros.node.sensors.images import encode_image
from edgellm_ros.ros.world_link import RELIABLE, LinkError, WorldLink

try:
    from tf2_msgs.msg import TFMessage
except ImportError:  # not on PyPI; part of every installed ROS
    TFMessage = None

COLUMNS = ("acceleration", "curvature")
STAGES = ("vision", "audio", "prefill", "decode", "action")  # of a plan in the runtime
PARTS = (*STAGES, "node", "topics")  # of `Timing.plan_s`
STATIC = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)


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


class ArenaLink(WorldLink):
    """A node named `arena`. Stamps are simulated time in nanoseconds."""

    def __init__(self) -> None:
        super().__init__("arena")
        self._odometry = self.create_publisher(Odometry, "edgellm/odom", RELIABLE)
        self._image = self.create_publisher(Image, "edgellm/image", QoSProfile(depth=5))
        self._camera_info = self.create_publisher(CameraInfo, "edgellm/camera_info", QoSProfile(depth=5))
        self._transforms = None if TFMessage is None else self.create_publisher(TFMessage, "/tf", RELIABLE)
        if TFMessage is not None:
            self._static = self.create_publisher(TFMessage, "/tf_static", STATIC)
            self._static.publish(TFMessage(transforms=[camera_transform(CAMERA)]))
        self.needed = [self._odometry, self._command, self._image]  # publishers that need a subscription
        self.create_subscription(ActionChunk, "edgellm/action_chunk", self._on_chunk, RELIABLE)
        self.create_subscription(Generation, "edgellm/generation", self._on_generation, RELIABLE)
        self.create_subscription(String, "edgellm/text_stream", self._on_text, qos_profile_sensor_data)
        self._reset()

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

    def ask(
        self,
        stamp: int,
        frame: NDArray[np.uint8],
        resend_after_s: float,
        attempts: int,
        command: str | None = None,
    ) -> tuple[Plan, Timing]:
        """Send the frame [H, W, 3] RGB of time `stamp` and wait for the answer to it.

        A new `command` is sent after its frame. LinkError without an answer, as `send` says.
        """
        self._settle()
        message, camera_info = to_image(stamp, frame), to_camera_info(stamp, CAMERA)
        self._reset(stamp)

        def publish() -> None:
            self._image.publish(message)
            self._camera_info.publish(camera_info)

        start = self.send(stamp, publish, self._answered, resend_after_s, attempts, command)
        return self._plan(start)

    # Receiving

    def _connected(self) -> bool:
        listeners = [publisher.get_subscription_count() for publisher in self.needed]
        talkers = [self.count_publishers(f"edgellm/{name}") for name in ("action_chunk", "generation")]
        return min(listeners + talkers) > 0

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
    return encode_image(frame, Header(stamp=to_time(stamp), frame_id=CAMERA_FRAME))


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
