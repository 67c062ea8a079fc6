# SPDX-License-Identifier: Apache-2.0
"""The arm's node over topics, with a simulated arm that runs its commands."""

from __future__ import annotations

import math
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import yaml
from rclpy.lifecycle import TransitionCallbackReturn
from sensor_msgs.msg import JointState
from std_msgs.msg import Float64MultiArray
from trajectory_msgs.msg import JointTrajectory

from edgellm_ros.ros.arm.contract import STANDS_S
from edgellm_ros.ros.arm.node import ArmNode
from edgellm_ros.ros.arm.parameters import SPECS
from edgellm_ros.ros.messaging import to_nanoseconds, to_time
from fixtures.driven_robot import DrivenRobot

SO101 = yaml.safe_load((Path(__file__).parents[2] / "examples" / "so101_arm.yaml").read_text())
JOINTS = [joint["ros"] for joint in SO101["joints"]]
NAMES = [joint["policy"] for joint in SO101["joints"]]
SPEEDS = np.array([joint["limits"]["speed"] for joint in SO101["joints"]])
KINDS = {"joint_trajectory": JointTrajectory, "forward_command": Float64MultiArray}
START = np.array([0.1, -0.5, 0.5, 0.2, 0.0, 0.8])  # rad
PERIOD_S = 0.01
# The simulated arm may be behind the node's motion by so many ticks. It computes the positions of a
# trajectory itself, and gets others in messages.
BEHIND = {"joint_trajectory": 2, "forward_command": 5}
BUSY_S = 1.0  # age of joint states on a busy computer
RESTS = 20  # ticks without motion
SLOWLY_S = 1.8  # of a chunk that a test ends before its end, also on a busy computer


class SimulatedArm:
    """An arm with its controller, which interpolates trajectories by cubic splines.

    A new trajectory replaces the old one whole, from the present state. Points of the past are dropped, and
    the last one is held.
    """

    def __init__(self) -> None:
        self.position, self.speed = START.copy(), np.zeros(len(JOINTS))
        self.at = 0.0  # s of the ROS clock
        self._points: list[tuple[float, np.ndarray, np.ndarray]] = []

    def follow(self, message: JointTrajectory) -> None:
        assert list(message.joint_names) == JOINTS
        start = to_nanoseconds(message.header.stamp) * 1e-9
        points = [
            (
                start + each.time_from_start.sec + each.time_from_start.nanosec * 1e-9,
                np.array(each.positions),
                np.array(each.velocities),
            )
            for each in message.points
        ]
        self._points = [(self.at, self.position, self.speed), *(each for each in points if each[0] > self.at)]

    def jump(self, message: Float64MultiArray) -> None:
        self.position = np.array(message.data)

    def run(self, now: float) -> None:
        self.at = now
        while len(self._points) > 1 and self._points[1][0] <= now:
            self._points.pop(0)
        if len(self._points) == 1:
            _, self.position, self.speed = self._points[0]
        elif self._points:
            (t0, p0, v0), (t1, p1, v1) = self._points[:2]
            span, part = t1 - t0, (now - t0) / (t1 - t0)
            slope, bend = span * v0 - (p1 - p0), (p1 - p0) - span * v1
            inner = (1 - part) * slope + part * bend
            self.position = (1 - part) * p0 + part * p1 + part * (1 - part) * inner
            self.speed = (p1 - p0) / span + (
                (1 - 2 * part) * inner + part * (1 - part) * (bend - slope)
            ) / span


class Robot(DrivenRobot):
    """A simulated arm and a planner, on one executor with the node if there is one."""

    def __init__(self, domain: int, folder: Path, with_node: bool = True, **parameters: object) -> None:
        super().__init__(domain, "edgellm_arm")
        kind = parameters.pop("kind", "joint_trajectory")
        self._behind = BEHIND[kind]
        self.contract = folder / "arm.yaml"
        self.contract.write_text(
            yaml.safe_dump({**SO101, "controller": {"kind": kind, "topic": "/controller/commands"}})
        )
        if with_node:
            own = {"contract": str(self.contract), "dry_run": False, "max_state_age": BUSY_S}
            self.run(ArmNode, **{**own, **parameters})
        self.simulated, self.moves, self.reports = SimulatedArm(), True, True
        self.commands: list = []
        self.previews: list = []
        self.states: list[JointState] = []
        self.history: list[np.ndarray] = []
        self.times: list[float] = []  # s, of the history
        self.node.create_subscription(KINDS[kind], "/controller/commands", self._on_command, 100)
        self.node.create_subscription(KINDS[kind], "/edgellm_arm/preview", self.previews.append, 100)
        self.node.create_subscription(JointState, "/edgellm_arm/state", self.states.append, 10)
        self.joints = self.node.create_publisher(JointState, "/joint_states", 10)
        self.node.create_timer(PERIOD_S, self._tick)

    @property
    def arm(self) -> ArmNode:
        return self.driver

    def _on_command(self, message: JointTrajectory | Float64MultiArray) -> None:
        self.commands.append(message)
        if isinstance(message, JointTrajectory):
            self.simulated.follow(message)
        else:
            self.simulated.jump(message)

    def _tick(self) -> None:
        self.times.append(self.now() * 1e-9)
        self.simulated.run(self.times[-1])
        self.history.append(self.simulated.position.copy())
        if self.reports:
            names = [*JOINTS[::-1], "wheel"]
            message = JointState(name=names, position=[*self.simulated.position[::-1].tolist(), 7.0])
            message.header.stamp = to_time(self.now())
            self.joints.publish(message)

    def activate(self) -> None:
        assert self.arm.trigger_configure() == TransitionCallbackReturn.SUCCESS
        self.arm.trigger_activate()
        self.connect()

    def connect(self) -> None:
        self.wait(lambda: self.states and self.chunks.get_subscription_count())
        self.listen(0.3)

    def send(self, change: float = 0.4, seconds: float = 1.0, **fields) -> None:
        """Publish a chunk that moves all joints by `change` (rad)."""
        horizon = round(seconds * 30)
        rows = self.simulated.position + np.linspace(change / horizon, change, horizon)[:, None]
        chunk = {
            "dt": 1 / 30,
            "horizon": horizon,
            "names": NAMES,
            "units": [""] * len(NAMES),
            "values": policy_values(rows).ravel().tolist(),
        }
        self.publish_chunk(**{**chunk, **fields})

    def status(self) -> tuple[str, dict[str, str]]:
        return super().status("arm")

    def moved(self) -> float:
        return float(np.abs(self.simulated.position - START).max())

    def begin(self) -> None:
        """Follow a slow chunk until the arm has moved."""
        self.send(change=1.0, seconds=SLOWLY_S)
        self.wait(lambda: self.moved() > 0.2)

    def rest(self, since: float, seconds: float) -> np.ndarray:
        """Wait until the arm stands; return where.

        The arm must stand from `seconds` after a time (s) on.
        """
        self.wait(lambda: len(self.history) > RESTS and np.ptp(self.history[-RESTS:], axis=0).max() < 1e-9)
        moves = np.flatnonzero(np.abs(np.diff(self.history, axis=0)).max(axis=1) > 1e-9)
        pause = np.diff(self.times[-len(self.times) // 2 :]).max()  # of this process on a busy computer
        assert self.times[max(moves[-1] + 1 - self._behind, 0)] - since < seconds + pause
        return self.simulated.position.copy()

    def refused(self, reason: str) -> None:
        """Send a chunk that must be refused; give it time to move the arm."""
        self.send()
        self.wait(lambda: self.arm.arm.counts[reason])
        self.listen(0.2)

    def seconds(self) -> float:
        return self.now() * 1e-9


def policy_values(positions: np.ndarray) -> np.ndarray:
    """Convert positions [..., 6] in rad to degrees, and the gripper's to percent."""
    values = np.degrees(positions)
    values[..., 5] = (positions[..., 5] + 0.17) / 1.91 * 100
    return values


@pytest.fixture
def make_robot(domain, tmp_path):
    robots = []

    def make(**parameters) -> Robot:
        robots.append(Robot(domain, tmp_path, **parameters))
        return robots[-1]

    yield make
    for robot in robots:
        robot.close()


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_degrees_and_percent_move_the_arm_within_its_limits(make_robot, kind):
    robot = make_robot(kind=kind)
    robot.activate()
    assert list(robot.states[-1].name) == NAMES
    np.testing.assert_allclose(robot.states[-1].position, policy_values(START), atol=1e-6)
    robot.history.clear()
    robot.times.clear()
    starts = []
    for _ in range(3):
        starts.append(robot.simulated.position.copy())
        robot.send(change=0.2)
        robot.listen(0.4)
    stands = robot.rest(robot.seconds(), 1.0)
    assert stands - starts[-1] == pytest.approx(np.full(6, 0.2), abs=0.02)
    assert (np.diff(starts, axis=0) > 0.04).all()
    behind, times = BEHIND[kind], np.array(robot.times)
    moves = np.abs(np.diff(robot.history, axis=0))[behind - 1 :]
    assert (moves < SPEEDS * (times[behind:] - times[:-behind])[:, None] + 1e-3).all()
    message, values = robot.status()
    assert (message, values["mode"], values["chunks_accepted"]) == ("ok", "waiting", "3")
    assert robot.previews[-1] == robot.commands[-1]
    if kind == "joint_trajectory":
        assert len(robot.commands) == 3
        assert not any(robot.commands[-1].points[-1].velocities)
        assert abs(to_nanoseconds(robot.commands[-1].header.stamp) - robot.now()) < 3e9


def test_by_default_nothing_moves_and_the_preview_has_what_would_be_sent(make_robot):
    assert SPECS["dry_run"].default is True
    robot = make_robot(dry_run=True)
    robot.activate()
    robot.send()
    robot.wait(lambda: robot.previews)
    robot.listen(0.5)
    assert robot.node.count_publishers("/controller/commands") == 0
    assert not robot.commands
    assert robot.moved() == 0
    assert robot.previews[0].points[-1].positions[0] - START[0] == pytest.approx(0.4, abs=0.05)
    assert robot.status()[1]["dry_run"] == "True"


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_stands_within_0_3_s_and_holds_until_resume(make_robot, kind):
    robot = make_robot(kind=kind)
    robot.activate()
    robot.begin()
    assert robot.call("stop").success
    stands = robot.rest(robot.seconds(), STANDS_S)
    assert np.abs(stands - START).max() < 0.9
    robot.refused("stopped")
    np.testing.assert_allclose(robot.simulated.position, stands, atol=1e-9)
    message, values = robot.status()
    assert "stopped until ~/resume" in message
    assert (values["mode"], values["chunks_stopped"], values["stops"]) == ("stopped", "1", "1")
    assert robot.call("resume").success
    assert not robot.call("resume").success
    robot.send(change=-0.2)
    robot.wait(lambda: np.abs(robot.simulated.position - stands).max() > 0.1)


def test_a_stop_before_the_node_is_configured_holds(make_robot):
    robot = make_robot()
    assert robot.call("stop").success
    robot.activate()
    robot.refused("stopped")
    assert not robot.commands
    assert robot.status()[1]["chunks_stopped"] == "1"


def test_without_joint_states_the_arm_brakes_and_follows_nothing(make_robot):
    robot = make_robot(max_state_age=0.2)
    robot.activate()
    robot.begin()
    robot.reports = False
    stands = robot.rest(robot.seconds(), 0.2 + STANDS_S)
    assert np.abs(stands - START).max() < 0.95
    robot.refused("stale_state")
    np.testing.assert_allclose(robot.simulated.position, stands, atol=1e-9)
    message, values = robot.status()
    assert "joint states are stale" in message
    assert (values["stale_stops"], values["chunks_stale_state"]) == ("1", "1")


def test_refused_chunks_are_counted_and_explained_and_move_nothing(make_robot):
    robot = make_robot()
    robot.activate()
    robot.send(values=[math.nan] * 180)
    robot.send(units=["radians"] * 6)
    robot.send(names=[f"joint_{index}.pos" for index in range(6)])
    robot.send(sample_index=3)
    robot.send(values=(policy_values(START + 1.5 * np.eye(6)[4]) * np.ones((30, 1))).ravel().tolist())
    robot.wait(lambda: robot.arm.arm.counts["too_far"])
    robot.listen(0.3)
    message, values = robot.status()
    for reason in ("not_finite", "wrong_units", "wrong_names", "too_far"):
        assert values[f"chunks_{reason}"] == "1"
    assert values["chunks_of_other_samples"] == "1"
    assert re.search(r"joint wrist_roll is at 0\.000 and the chunk begins at 1\.500, at most 0\.35", message)
    assert not robot.commands


def test_a_contract_that_does_not_fit_the_engine_is_refused_before_anything_moves(make_robot, policy_engine):
    robot = make_robot(engine_dir=str(policy_engine))
    assert robot.arm.trigger_configure() == TransitionCallbackReturn.FAILURE
    message, values = robot.status()
    assert message.startswith("actions: 'joint_0.pos, ")
    assert "\n" not in message
    assert values["state"] == "unconfigured"
    assert robot.node.count_publishers("/controller/commands") == 0


def test_without_a_contract_it_says_what_to_set(make_robot):
    robot = make_robot(contract="")
    assert robot.arm.trigger_configure() == TransitionCallbackReturn.FAILURE
    assert "parameter contract is empty" in robot.status()[0]


def test_deactivation_brakes_and_no_command_follows(make_robot):
    robot = make_robot()
    robot.activate()
    robot.begin()
    robot.arm.trigger_deactivate()
    stands, count = robot.rest(robot.seconds(), STANDS_S), len(robot.commands)
    assert np.abs(stands - START).max() < 0.9
    robot.send()
    robot.listen(0.5)
    assert len(robot.commands) == count
    np.testing.assert_allclose(robot.simulated.position, stands, atol=1e-9)


def test_every_parameter_is_described(make_robot):
    described = make_robot().arm.describe_parameters(list(SPECS))
    assert all(parameter.description.endswith(".") for parameter in described)


def test_a_signal_brakes_the_arm_before_the_process_ends(make_robot, domain, tmp_path):
    from edgellm_ros.ros.processes import ARM_MODULE, Child, ros_environment

    robot = make_robot(with_node=False)
    values = {"autostart": "true", "dry_run": "false", "contract": robot.contract, "max_state_age": BUSY_S}
    arguments = [argument for name, value in values.items() for argument in ("-p", f"{name}:={value}")]
    child = Child(
        "arm", ["-m", ARM_MODULE, "--ros-args", *arguments], tmp_path / "log", ros_environment(domain)
    )
    try:
        robot.connect()
        robot.begin()
        child.process.send_signal(signal.SIGINT)
        robot.wait(lambda: child.process.poll() is not None)
        assert child.process.returncode == 0
        stands = robot.rest(robot.seconds(), STANDS_S)
        assert np.abs(stands - START).max() < 0.95
        robot.listen(0.2)
        np.testing.assert_allclose(robot.simulated.position, stands, atol=1e-9)
        assert "Traceback" not in child.log.read_text()
    finally:
        child.stop()
