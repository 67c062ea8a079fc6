# SPDX-License-Identifier: Apache-2.0
"""The lifecycle node `edgellm_arm` around an ArmFollower.

    ~/action_chunk, joint states --> ArmFollower --> the controller's topic, ~/preview
    ~/stop, ~/resume -------------------^        --> ~/state: joint states as the policy takes them

Everything runs on one thread, and no callback waits, except that the arm is braked to a standstill within
the transitions that end its motion.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rclpy.duration import Duration
from rclpy.lifecycle import LifecycleState, TransitionCallbackReturn
from rclpy.parameter import Parameter
from rclpy.qos import QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import JointState
from std_msgs.msg import Float64MultiArray
from std_srvs.srv import Trigger
from trajectory_msgs.msg import JointTrajectory

from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.msg import ActionChunk
from edgellm_ros.ros.arm.arm_follower import ArmFollower
from edgellm_ros.ros.arm.chunk import read_chunk
from edgellm_ros.ros.arm.contract import TRAJECTORY, Contract, check_policy, read_contract
from edgellm_ros.ros.arm.messages import to_trajectory
from edgellm_ros.ros.arm.motion import Motion
from edgellm_ros.ros.arm.parameters import SPECS, read_settings
from edgellm_ros.ros.arm.status import find_problems, list_values
from edgellm_ros.ros.chunk_checks import RefusedChunkError
from edgellm_ros.ros.diagnostic_status import FAULT, Problem
from edgellm_ros.ros.driving_node import ACKNOWLEDGED_S, CHUNKS, COMMANDS, LOG_EVERY_S, DrivingNode
from edgellm_ros.ros.lifecycle import logged
from edgellm_ros.ros.messaging import NANOSECONDS, overridable, to_nanoseconds, to_time

STATES = QoSProfile(depth=50, reliability=ReliabilityPolicy.BEST_EFFORT)


class ArmNode(DrivingNode):
    """The node; docs/arm.md lists its interfaces and parameters."""

    def __init__(self, **kwargs: Any) -> None:
        """Declare the parameters, offer the services; `kwargs` are for LifecycleNode."""
        super().__init__("edgellm_arm", SPECS, **kwargs)
        self.arm: ArmFollower | None = None  # exists while the node is configured
        self._sent: Motion | None = None
        self._stopped = False  # before the first configuration
        self._problem = ""  # why the node could not be configured

    # Lifecycle

    @logged
    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Read the contract; fails, with one line in the log, if it does not fit."""
        try:
            contract = self._read_contract()
            arm = ArmFollower(contract, read_settings(self))
        except (OSError, ValueError) as error:
            self._problem = str(error)
            self.get_logger().error(self._problem)
            return TransitionCallbackReturn.FAILURE
        self._problem = ""
        arm.stopped = self._stopped if self.arm is None else self.arm.stopped  # it outlives a configuration
        self.arm = arm
        message = JointTrajectory if contract.controller.kind == TRAJECTORY else Float64MultiArray
        names = {"preview": "~/preview"}
        if not self._value("dry_run"):
            names["commands"] = contract.controller.topic
        self._outputs = {
            key: self.create_lifecycle_publisher(message, name, **overridable(COMMANDS))
            for key, name in names.items()
        }
        self._outputs["state"] = self.create_lifecycle_publisher(
            JointState, "~/state", **overridable(QoSProfile(depth=10))
        )
        self._inputs = [
            self.create_subscription(ActionChunk, "~/action_chunk", self._on_chunk, **overridable(CHUNKS)),
            self.create_subscription(
                JointState, contract.state_topic, self._on_joint_states, **overridable(STATES)
            ),
        ]
        return super().on_configure(state)

    def _read_contract(self) -> Contract:
        if not self._value("contract"):
            raise ValueError("parameter contract is empty: set it to the YAML file of docs/arm.md")
        contract = read_contract(Path(self._value("contract")))
        if self._value("engine_dir"):
            check_policy(contract, EngineConfig.load(self._value("engine_dir")).policy)
        return contract

    @logged
    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Follow chunks of frames from now on."""
        result = super().on_activate(state)
        arm = self._configured_arm()
        arm.start(self._wall())
        self._sent = None
        self._timer = self.create_timer(1.0 / arm.contract.rate, self._tick, clock=self._motion_clock())
        if self._value("dry_run"):
            self.get_logger().warning("dry run: ~/preview has what would be sent, and nothing moves")
        return result

    def _brake(self) -> None:
        """Brake until the arm stands; takes at most 0.3 s and the acknowledgement's time."""
        arm = self._configured_arm()
        arm.drop(self._now())
        deadline = time.monotonic() + ACKNOWLEDGED_S  # simulated time may stand still
        while True:
            self._send()
            if not arm.is_moving(self._now()) or time.monotonic() > deadline:
                break
            time.sleep(1.0 / arm.contract.rate)
        if "commands" in self._outputs:
            self._outputs["commands"].wait_for_all_acked(Duration(seconds=ACKNOWLEDGED_S))

    # Inputs

    def _on_chunk(self, message: ActionChunk) -> None:
        if self._timer is None:
            return
        arm = self._configured_arm()
        if message.sample_index != self._value("sample_index"):
            arm.counts["other_samples"] += 1
            return
        try:
            stamp = to_nanoseconds(message.header.stamp)
            chunk = read_chunk(arm.contract, stamp, **self._chunk_fields(message))
            arm.add(chunk, self._now(), self._wall())
        except RefusedChunkError as error:
            arm.counts[error.reason] += 1
            self._report_refused(error)
        else:
            self._send_trajectory()

    def _on_joint_states(self, message: JointState) -> None:
        arm, now, wall = self._configured_arm(), self._now(), self._wall()
        stamp = to_nanoseconds(message.header.stamp) or wall
        try:
            complete = arm.observe(message.name, message.position, now - max((wall - stamp) * 1e-9, 0.0))
        except ValueError as error:
            arm.counts["states_refused"] += 1
            self.get_logger().warning(str(error), throttle_duration_sec=LOG_EVERY_S)
            return
        if complete and arm.state_age(now) <= arm.settings.max_state_age:
            state = JointState(name=list(arm.contract.policy_names))
            state.header.stamp = to_time(stamp)
            state.position = arm.contract.to_policy(arm.measured).tolist()
            self._outputs["state"].publish(state)

    def _on_stop(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        self._stopped = True
        if self.arm is not None:
            self.arm.stop(self._now())
            self.arm.counts["stops"] += 1
        if self._timer is not None:
            self._send_trajectory()
        self.get_logger().warning("stopped until ~/resume")
        response.success, response.message = True, "the arm stops until ~/resume"
        return response

    def _on_resume(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        response.success = self._stopped if self.arm is None else self.arm.stopped
        self._stopped = False
        response.message = "the next chunk is followed" if response.success else "it was not stopped"
        if self.arm is not None:
            self.arm.resume(self._wall())
        return response

    # Outputs

    def _tick(self) -> None:
        arm = self._configured_arm()
        problem = arm.problem
        arm.step(self._now(), self._wall())
        if arm.problem != problem:
            self.get_logger().error(f"stopped until ~/resume: {arm.problem}")
        self._send()

    def _send(self) -> None:
        """Publish a new motion once as a trajectory, or the present command."""
        arm, now = self._configured_arm(), self._now()
        if arm.contract.controller.kind == TRAJECTORY:
            self._send_trajectory()
        elif arm.motion is not None and now < arm.motion.end + 2 / arm.contract.rate:
            command = arm.command(now)
            if command is not None:
                self._publish(Float64MultiArray(data=command.tolist()))

    def _send_trajectory(self) -> None:
        """Publish a new motion at once; commands wait for their time."""
        arm = self._configured_arm()
        motion, before, self._sent = arm.motion, self._sent, arm.motion
        if arm.contract.controller.kind == TRAJECTORY and motion is not None and motion is not before:
            start = self._wall() + round((motion.start - self._now()) * NANOSECONDS)
            self._publish(to_trajectory(motion, arm.contract.ros_names, start))

    def _publish(self, message: JointTrajectory | Float64MultiArray) -> None:
        for name in ("commands", "preview"):
            if name in self._outputs:
                self._outputs[name].publish(message)

    # Parameters, clocks and diagnostics

    def _configured_arm(self) -> ArmFollower:
        assert self.arm is not None
        return self.arm

    def _now(self) -> float:
        return self._motion_clock().now().nanoseconds * 1e-9

    def _wall(self) -> int:
        return self.get_clock().now().nanoseconds

    def _on_parameters_set(self, changed: list[Parameter]) -> None:
        if self.arm is not None:
            self.arm.settings = read_settings(self)

    def _every_second(self) -> None:
        problems: list[Problem] = [(FAULT, self._problem)] if self._problem else []
        problems += self._recently_refused()
        values: dict[str, object] = {"state": self.state, "dry_run": self._value("dry_run")}
        if self.arm is not None:
            problems += find_problems(self.arm, self._now(), self._timer is not None)
            values |= list_values(self.arm, self._now())
        self._publish_status("arm", problems, values)
