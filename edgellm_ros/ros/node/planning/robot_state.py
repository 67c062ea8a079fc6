# SPDX-License-Identifier: Apache-2.0
"""The robot's own state at the time of a frame: past motion, or joint positions."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from rclpy.node import Node

from edgellm_ros.diffusion.config import TrajectoryHistoryConfig
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.ros.diagnostic_status import FAULT, WARN, Problem, since
from edgellm_ros.ros.node.metrics import NodeMetrics
from edgellm_ros.ros.node.sensors.joint_states import JointStates
from edgellm_ros.ros.node.sensors.odometry import OdometryBuffer
from edgellm_ros.ros.node.settings.live_parameters import LiveParameters

LOG_EVERY_S = 5.0


class RobotState(Protocol):
    """What an engine wants to know of the robot."""

    def at(self, stamp: float | None, drives: bool, *, earlier: bool) -> dict[str, Any]:
        """Return the state's fields of `LLMGenerationRequest`.

        stamp: the frame's time in s, None for now; drives: the plan has trajectories; earlier: with the
        states of a policy's earlier observations. StaleInputError for a state that is missing or too old,
        ValueError for one that cannot be used.
        """

    def problems(self) -> list[Problem]:
        """Return what is wrong with the state, for /diagnostics."""


def robot_state(
    node: Node,
    parameters: LiveParameters,
    config: EngineConfig,
    *,
    odometry: OdometryBuffer,
    joints: JointStates,
    metrics: NodeMetrics,
) -> RobotState:
    """Return the state that an engine takes.

    Joint positions for a policy, past motion for an action expert.
    """
    if config.policy is not None and config.policy.state is not None:
        return JointPositions(node, parameters, joints, metrics, config.policy.earlier_observations)
    if config.expert is not None:
        return Motion(node, parameters, odometry, config.expert.trajectory_history, metrics)
    return Stateless()


class Stateless:
    """For an engine that answers with words only."""

    def at(self, stamp: float | None, drives: bool, *, earlier: bool) -> dict[str, Any]:
        return {}

    def problems(self) -> list[Problem]:
        return []


class Motion:
    """Past poses and speed, from odometry."""

    def __init__(
        self,
        node: Node,
        parameters: LiveParameters,
        odometry: OdometryBuffer,
        history: TrajectoryHistoryConfig,
        metrics: NodeMetrics,
    ) -> None:
        self._parameters = parameters
        self._odometry = odometry
        self._points, self._dt = history.num_points, history.dt
        self._metrics = metrics
        self._clock = node.get_clock()
        self._logger = node.get_logger()

    def at(self, stamp: float | None, drives: bool, *, earlier: bool) -> dict[str, Any]:
        """Return history and speed; neither without odometry.

        ValueError if the plan drives, and either poses or twist of the odometry are not the robot's motion.
        """
        parameters, points, dt = self._parameters.current, self._points, self._dt
        if stamp is None:
            now = self._clock.now().nanoseconds
            motion = self._odometry.newest_state(now, points, dt, parameters.max_input_age)
        else:
            self._odometry.wait_until(stamp, parameters.odom_wait)
            motion = self._odometry.state_at(stamp, points, dt, parameters.max_input_age)
        if motion is None:
            return {}
        problem = motion.agreement.problem(parameters.odom_tolerance)
        if problem and drives and motion.agreement.refused(parameters.odom_tolerance):
            raise ValueError(f"{problem}: no trajectory is planned from it")
        if problem:
            self._logger.warning(
                f"~/odom: {problem}: the past poses are computed from the twist",
                throttle_duration_sec=LOG_EVERY_S,
            )
        return {"history": motion.history, "speed": motion.speed}

    def problems(self) -> list[Problem]:
        """Return whether odometry is missing, and whether its poses and twist differ."""
        parameters, age = self._parameters.current, self._metrics.odometry.age
        agreement = self._odometry.agreement((self._points - 1) * self._dt)
        if self._odometry.newest_stamp is None:
            return [(WARN, "no odometry: the robot is assumed to stand still")]
        if age > parameters.max_input_age:
            return [(WARN, f"no odometry {since(age)}")]
        problem = "" if agreement is None else agreement.problem(parameters.odom_tolerance)
        if agreement is None or not problem:
            return []
        return [(FAULT if agreement.refused(parameters.odom_tolerance) else WARN, problem)]


class JointPositions:
    """Positions of a policy's joints."""

    def __init__(
        self,
        node: Node,
        parameters: LiveParameters,
        joints: JointStates,
        metrics: NodeMetrics,
        earlier: tuple[float, ...],
    ) -> None:
        """Take the source of states.

        `earlier`: how long ago earlier observations are, in s, oldest first.
        """
        self._earlier = earlier
        self._parameters = parameters
        self._joints = joints
        self._metrics = metrics
        self._clock = node.get_clock()

    def at(self, stamp: float | None, drives: bool, *, earlier: bool) -> dict[str, Any]:
        """Return the state [D] at the stamp; with earlier ones [O,D], oldest first."""
        parameters = self._parameters.current
        if stamp is None:
            now = self._clock.now().nanoseconds
            return {"state": self._joints.newest_state(now, parameters.max_input_age)}
        self._joints.wait_until(stamp, parameters.odom_wait)
        max_age = parameters.max_input_age
        if not earlier or not self._earlier:
            return {"state": self._joints.state_at(stamp, max_age)}
        times = [*(stamp - ago for ago in self._earlier), stamp]
        return {"state": np.stack([self._joints.state_at(stamp, max_age, stamp - time) for time in times])}

    def problems(self) -> list[Problem]:
        age = self._metrics.joint_states.age
        if self._joints.problem:
            return [(FAULT, self._joints.problem)]
        if age > self._parameters.current.max_input_age:
            return [(WARN, f"no joint state with all of state_joints {since(age)}")]
        return []
