# SPDX-License-Identifier: Apache-2.0
"""Topics and services that the world shares with edgellm and edgellm_arm.

    /front/image_raw                              -> edgellm
    /joint_states                                 -> edgellm_arm
    edgellm/action_chunk, edgellm/generation      <- edgellm
    /arm_controller/joint_trajectory              <- edgellm_arm
    edgellm_arm/state, /diagnostics               <- edgellm_arm
    edgellm_arm/change_state, edgellm_arm/resume  services of edgellm_arm

The absolute names are those of the contract. WorldLink has the clock, the command and the other services.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable

import numpy as np
from diagnostic_msgs.msg import DiagnosticArray
from edgellm_ros.msg import ActionChunk, Generation
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState, GetState
from numpy.typing import NDArray
from rclpy.qos import QoSProfile
from sensor_msgs.msg import Image, JointState
from std_msgs.msg import Header
from std_srvs.srv import Trigger
from trajectory_msgs.msg import JointTrajectory

from edgellm_ros.echo import quoted
from edgellm_ros.ros.arm.arm_follower import REASONS
from edgellm_ros.ros.messaging import NANOSECONDS, to_nanoseconds, to_time
from edgellm_ros.ros.node.sensors.images import encode_image
from edgellm_ros.ros.world_link import RELIABLE, LinkError, WorldLink
from edgellm_tabletop.episodes.drivers import contract
from edgellm_tabletop.episodes.robot import Plan
from edgellm_tabletop.units import NAMES
from edgellm_tabletop.world import STEP_S

ARM, CHUNKS = "edgellm_arm", "edgellm/action_chunk"
ATTEMPTS, ATTEMPT_S = 20, 0.5  # to get the arm's answer to joint states; a message may be lost


class TabletopLink(WorldLink):
    """A node named `tabletop`. Stamps are simulated time in nanoseconds.

    follow: takes trajectories as TrajectoryController.follow does. After `make_chunks` this node makes the
    chunks, by `give`, in place of the edgellm node.
    """

    def __init__(self, follow: Callable[..., None]) -> None:
        super().__init__("tabletop")
        (camera,) = contract().cameras
        self._follow, self._with_node = follow, True
        self._states = self.create_publisher(JointState, contract().state_topic, RELIABLE)
        self._image = self.create_publisher(Image, camera.topic, QoSProfile(depth=5))
        self.create_subscription(ActionChunk, CHUNKS, self._on_chunk, RELIABLE)
        self.create_subscription(Generation, "edgellm/generation", self._on_generation, RELIABLE)
        self.create_subscription(JointTrajectory, contract().controller.topic, self._on_trajectory, RELIABLE)
        self.create_subscription(JointState, f"{ARM}/state", self._on_state, RELIABLE)
        self.create_subscription(DiagnosticArray, "/diagnostics", self._on_diagnostics, RELIABLE)
        self._arm_state = self.create_client(GetState, f"{ARM}/get_state")
        self._change_state = self.create_client(ChangeState, f"{ARM}/change_state")
        self._resume = self.create_client(Trigger, f"{ARM}/resume")
        self._now = self._acknowledged = 0
        self._joints: JointState | None = None  # the last ones
        self._counts: dict[str, int] = {}  # refused chunks by reason, since the arm's node began
        self._reset(0)

    # Publishing

    def make_chunks(self) -> None:
        """Make the chunks in place of the edgellm node."""
        self._with_node = False
        self._chunks = self.create_publisher(ActionChunk, CHUNKS, RELIABLE)

    def publish_joints(self, stamp: int, positions: NDArray) -> None:
        """Set the clock to `stamp` and publish the positions [6] in radians."""
        self._now = stamp
        self.publish_clock(stamp)
        message = JointState(name=list(contract().ros_names), position=positions.tolist())
        message.header.stamp = to_time(stamp)
        self._states.publish(message)
        self._joints = message

    def tick(self, stamp: int, positions: NDArray) -> None:
        """Do as `publish_joints`, and wait until the arm's node has taken notice.

        LinkError without an answer.
        """
        for _ in range(ATTEMPTS):
            self.publish_joints(stamp, positions)
            if self.spin_until(lambda: self._acknowledged >= stamp, ATTEMPT_S):
                return
        raise LinkError(f"no answer from {ARM} to the joint states of t = {stamp * 1e-9:.2f} s")

    def ask(
        self,
        stamp: int,
        image: NDArray[np.uint8],
        resend_after_s: float,
        attempts: int,
        command: str | None = None,
    ) -> Plan:
        """Send a frame, and wait until the arm follows its chunk or refuses it.

        image: [H, W, 3] RGB, of time `stamp`.

        A new `command` is sent after its frame. LinkError without an answer, as `send` says.
        """
        self._settle()
        frame = encode_image(image, Header(stamp=to_time(stamp), frame_id="front_camera"))
        times = itertools.count()

        def publish() -> None:
            if next(times) and self._joints is not None:  # edgellm may have missed ~/state of edgellm_arm
                self._states.publish(self._joints)
            self._image.publish(frame)

        return self._wait(stamp, publish, resend_after_s, attempts, command)

    def give(self, stamp: int, targets: NDArray, resend_after_s: float, attempts: int) -> Plan:
        """Publish a chunk [T, 6] in place of the edgellm node, and wait as `ask`.

        targets: in the policy's units.
        """
        chunk = ActionChunk(request_id=str(stamp), dt=STEP_S, horizon=len(targets), names=list(NAMES))
        chunk.header.stamp = to_time(stamp)
        chunk.units, chunk.values = [""] * len(NAMES), targets.ravel().tolist()
        plan = self._wait(stamp, lambda: self._chunks.publish(chunk), resend_after_s, attempts)
        return dataclasses.replace(plan, seconds=0.0)  # nothing was computed

    def _wait(
        self,
        stamp: int,
        publish: Callable[[], None],
        resend_after_s: float,
        attempts: int,
        command: str | None = None,
    ) -> Plan:
        self._reset(stamp)
        start = self.send(stamp, publish, self._answered, resend_after_s, attempts, command)
        assert self._chunk is not None
        chunk, arrived = self._chunk
        node_s = 0.0 if self._generation is None else self._generation.total_latency
        return Plan(to_targets(chunk), max(arrived - start, 0.0), self._refused, node_s)

    # Waiting

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until all nodes are active and connected; LinkError if one is not."""
        if self._with_node:
            self.wait_until_active(timeout_s)
        self.wait_for_state(self._arm_state, ARM, self._arm_connected, timeout_s)

    def restart_arm(self) -> None:
        """Have the arm's node forget all motion, and follow chunks of frames from now on.

        The arm must be at rest. LinkError if the node does not become active.
        """
        for transition in (Transition.TRANSITION_DEACTIVATE, Transition.TRANSITION_ACTIVATE):
            self.call(self._change_state, ChangeState.Request(transition=Transition(id=transition)))
        state = self.call(self._arm_state, GetState.Request()).current_state
        if state.label != "active":
            raise LinkError(f"{ARM} is {state.label}, expected active")
        self.call(self._resume, Trigger.Request())

    def _connected(self) -> bool:
        listeners = [each.get_subscription_count() for each in (self._image, self._command)]
        talkers = [self.count_publishers(f"edgellm/{name}") for name in ("action_chunk", "generation")]
        joined = self.count_subscribers(f"{ARM}/state") > 1  # beside this node
        return min(listeners + talkers) > 0 and joined

    def _arm_connected(self) -> bool:
        topics = contract().controller.topic, f"{ARM}/state"
        return (
            self._states.get_subscription_count() > 0
            and self.count_subscribers(CHUNKS) > 1  # beside this node
            and min(self.count_publishers(topic) for topic in topics) > 0
        )

    # Receiving

    def _reset(self, stamp: int) -> None:
        self._stamp = stamp
        self._heard = 0
        self._generation: Generation | None = None
        self._chunk: tuple[ActionChunk, float] | None = None  # and when it arrived
        self._follows, self._refused = False, ""

    def _answered(self) -> bool:
        complete = self._chunk is not None and (not self._with_node or self._generation is not None)
        return complete and (self._follows or bool(self._refused))

    def _on_generation(self, message: Generation) -> None:
        if to_nanoseconds(message.header.stamp) == self._stamp:
            self._heard += 1
            self._generation = message

    def _on_chunk(self, message: ActionChunk) -> None:
        if to_nanoseconds(message.header.stamp) == self._stamp and not message.sample_index:
            self._heard += 1
            self._chunk = message, time.perf_counter()

    def _on_state(self, message: JointState) -> None:
        self._acknowledged = max(self._acknowledged, to_nanoseconds(message.header.stamp))

    def _on_trajectory(self, message: JointTrajectory) -> None:
        self._heard += 1
        self._follows = True
        try:
            self._follow(self._now, *to_points(message, self._now))
        except ValueError as error:
            raise LinkError(f"{contract().controller.topic}: {error}") from None

    def _on_diagnostics(self, message: DiagnosticArray) -> None:
        """Learn from the arm's counters that a chunk was refused.

        The counters come every second.
        """
        for status in message.status:
            if not status.name.endswith(f"{ARM}: arm"):
                continue
            values = {pair.key: pair.value for pair in status.values}
            counts = {reason: int(values.get(f"chunks_{reason}", 0)) for reason in REASONS}
            more = [reason for reason, count in counts.items() if count > self._counts.get(reason, 0)]
            self._counts = counts
            if more:
                self._heard += 1
                self._refused = more[0]


def to_points(message: JointTrajectory, now: int) -> tuple[list[int], NDArray, NDArray]:
    """Return the times [N] (ns), positions and speeds [N, J] of a trajectory.

    Columns are in the order of the contract. A stamp of 0 means `now`. Raises LinkError for other joints, or
    points without positions or velocities.
    """
    names = list(message.joint_names)
    if sorted(names) != sorted(contract().ros_names):
        raise LinkError(f"a trajectory of {quoted(', '.join(names))}: this arm has {contract().ros_names}")
    order = [names.index(name) for name in contract().ros_names]
    start = to_nanoseconds(message.header.stamp) or now
    times, rows = [], []
    for point in message.points:
        if len(point.positions) != len(names) or len(point.velocities) != len(names):
            raise LinkError("a point of a trajectory has no position or no velocity for some joints")
        times.append(start + point.time_from_start.sec * NANOSECONDS + point.time_from_start.nanosec)
        rows.append((point.positions, point.velocities))
    positions, speeds = np.array(rows, np.float64).reshape(-1, 2, len(names)).transpose(1, 0, 2)[:, :, order]
    return times, positions, speeds


def to_targets(chunk: ActionChunk) -> NDArray[np.float32]:
    """Return the joint targets [T, 6] of a chunk; LinkError for other joints."""
    names = list(chunk.names)
    if sorted(names) != sorted(NAMES) or len(chunk.values) != chunk.horizon * len(names):
        raise LinkError(f"a chunk of {quoted(', '.join(names))}: this arm has {', '.join(NAMES)}")
    rows = np.asarray(chunk.values, np.float32).reshape(chunk.horizon, len(names))
    return rows[:, [names.index(name) for name in NAMES]]
