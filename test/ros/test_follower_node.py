# SPDX-License-Identifier: Apache-2.0
"""The follower as a node: topics, lifecycle, services, parameters and diagnostics."""

from __future__ import annotations

import math
import signal
import time
from itertools import pairwise

import pytest
from geometry_msgs.msg import Twist, TwistStamped
from nav_msgs.msg import Odometry, Path
from rclpy.parameter import Parameter
from rclpy.qos import DurabilityPolicy, ReliabilityPolicy

from edgellm_ros.ros.follower.node import FollowerNode
from edgellm_ros.ros.follower.parameters import SPECS
from edgellm_ros.ros.messaging import to_nanoseconds
from fixtures.driven_robot import DrivenRobot

PERIOD_S, DECELERATION = 1 / 20, 1.5


class Base(DrivenRobot):
    """A robot's base and a planner, on one executor with the follower if there is one."""

    def __init__(self, domain: int, follower: bool = True, twist: type = Twist, **parameters: object) -> None:
        super().__init__(domain, "edgellm_follower")
        if follower:
            self.run(FollowerNode, **parameters)
        self.commands: list[tuple[float, object]] = []
        self.paths: list[Path] = []
        self.node.create_subscription(
            twist, "/edgellm_follower/cmd_vel", lambda m: self.commands.append((time.monotonic(), m)), 100
        )
        self.node.create_subscription(Path, "/edgellm_follower/path", self.paths.append, 10)
        self.odom = self.node.create_publisher(Odometry, "/edgellm_follower/odom", 10)

    @property
    def follower(self) -> FollowerNode:
        return self.driver

    def activate(self) -> None:
        self.follower.trigger_configure()
        self.follower.trigger_activate()
        self.wait(lambda: self.commands and self.paths)
        counts = self.follower.follower.counts

        def is_heard() -> bool:  # a publisher finds a subscription before the subscription finds it
            self.send(sample_index=65535)
            self.odom.publish(Odometry())
            self.listen(0.05)
            return counts["other_samples"] > 0

        self.wait(is_heard)
        self.listen(0.1)
        counts.clear()

    def send(self, acceleration: float = 1.0, seconds: float = 4.0, stamp: int | None = None, **fields):
        """Publish a chunk of constant acceleration, of the present frame."""
        horizon = round(seconds / 0.1)
        chunk = {
            "dt": 0.1,
            "horizon": horizon,
            "names": ["acceleration", "curvature"],
            "units": ["m/s^2", "1/m"],
            "values": [acceleration, 0.5] * horizon,
        }
        self.publish_chunk(stamp, **{**chunk, **fields})

    def speeds(self) -> list[float]:
        return [getattr(message, "twist", message).linear.x for _, message in self.commands]

    def drive(self, **chunk) -> None:
        """Accelerate to half a metre per second."""

        def moves() -> bool:
            self.send(**chunk)
            self.listen(0.5)
            return self.speeds()[-1] > 0

        self.wait(moves)
        self.wait(lambda: self.speeds()[-1] > 0.5)

    def status(self) -> tuple[str, dict[str, str]]:
        return super().status("follower")


@pytest.fixture
def make_base(domain):
    bases = []

    def make(**parameters) -> Base:
        bases.append(Base(domain, **parameters))
        return bases[-1]

    yield make
    for base in bases:
        base.close()


@pytest.fixture
def base(make_base) -> Base:
    base = make_base()
    base.activate()
    return base


def test_the_qos_of_its_topics_can_be_overridden(make_base):
    name = "qos_overrides./edgellm_follower"
    base = make_base(
        **{f"{name}/cmd_vel.publisher.durability": "transient_local",
           f"{name}/odom.subscription.reliability": "reliable"}
    )  # fmt: skip
    base.follower.trigger_configure()
    get_publishers = base.node.get_publishers_info_by_topic
    base.wait(lambda: get_publishers("/edgellm_follower/cmd_vel"))
    (commands,) = get_publishers("/edgellm_follower/cmd_vel")
    (path,) = get_publishers("/edgellm_follower/path")
    (odom,) = base.node.get_subscriptions_info_by_topic("/edgellm_follower/odom")
    assert commands.qos_profile.durability == DurabilityPolicy.TRANSIENT_LOCAL
    assert path.qos_profile.durability == DurabilityPolicy.VOLATILE
    assert odom.qos_profile.reliability == ReliabilityPolicy.RELIABLE


def test_a_chunk_is_driven_at_the_rate_and_the_path_ends_at_a_standstill(base):
    base.drive()
    base.listen(0.5)
    times = [when for when, _ in base.commands][-10:]
    assert (times[-1] - times[0]) / 9 == pytest.approx(PERIOD_S, rel=0.3)
    twist = base.commands[-1][1]
    assert twist.linear.x == pytest.approx(0.8)
    assert twist.angular.z == pytest.approx(0.8 * 0.5)
    path = base.paths[-1]
    first, *_, before, last = path.poses
    assert path.header.frame_id == "base_link"
    assert (first.pose.position.x, first.pose.position.y) == (0, 0)
    assert last.pose.position.y > 0.01
    assert (
        math.dist(
            (before.pose.position.x, before.pose.position.y), (last.pose.position.x, last.pose.position.y)
        )
        < 0.5 * 0.8 * 0.1
    )


def test_braking_begins_within_0_3_s_after_the_last_row(base):
    base.send(seconds=1.0)
    end = time.monotonic() + 1.0
    base.wait(lambda: base.speeds()[-1] > 0.7)
    base.listen(max(end - time.monotonic(), 0.0) + 1.0)
    speeds = base.speeds()
    top = speeds.index(max(speeds))
    began = next(base.commands[index][0] for index in range(top, len(speeds)) if speeds[index] < speeds[top])
    assert -0.05 < began - end < 0.3
    assert speeds[-1] == 0
    assert base.status()[1]["watchdog_stops"] == "1"


def test_deactivation_brakes_to_a_standstill_and_no_command_follows(base):
    base.drive()
    before = len(base.commands)
    base.follower.trigger_deactivate()
    base.listen(0.3)
    braking = base.speeds()[before - 1 :]
    assert braking[-1] == 0
    assert all(a - b <= DECELERATION * 2 * PERIOD_S + 1e-9 for a, b in pairwise(braking))
    count = len(base.commands)
    base.send()
    base.listen(0.5)
    assert len(base.commands) == count
    base.follower.trigger_activate()
    base.listen(0.5)
    assert len(base.commands) > count
    assert base.speeds()[-1] == 0  # the chunk from before is not driven


def test_a_stop_holds_over_chunks_and_an_activation_until_resume(base):
    base.drive()
    assert base.call("stop").success
    base.wait(lambda: base.speeds()[-1] == 0, 2.0)
    count = len(base.commands)
    base.send()
    base.listen(0.3)
    base.follower.trigger_deactivate()
    base.follower.trigger_activate()
    base.send()
    base.listen(0.3)
    assert set(base.speeds()[count:]) == {0}
    message, values = base.status()
    assert "stopped until ~/resume" in message
    assert (values["mode"], values["chunks_stopped"]) == ("stopped", "2")
    assert base.call("resume").success
    assert not base.call("resume").success
    base.drive()


def test_commands_may_carry_a_stamp(make_base):
    base = make_base(twist=TwistStamped, stamped=True, frame_id="robot/base")
    base.activate()
    base.drive()
    header = base.commands[-1][1].header
    assert header.frame_id == "robot/base"
    assert abs(to_nanoseconds(header.stamp) - base.now()) < 5e8


def test_a_plan_begins_at_the_speed_of_the_odometry(base):
    message = Odometry()
    message.twist.twist.linear.x = 0.4
    base.wait(lambda: base.odom.get_subscription_count() > 0)
    for _ in range(5):
        base.odom.publish(message)
        base.listen(0.05)
    base.send(acceleration=0.0)
    base.wait(lambda: base.speeds()[-1] > 0.39)
    base.listen(0.2)
    assert base.speeds()[-1] == pytest.approx(0.4)


def test_refused_chunks_and_odometry_are_counted_and_explained(base):
    base.send(values=[math.nan, 0.0] * 40)
    base.send(units=["g", "1/m"])
    base.send(dt=0.0)
    base.send(stamp=base.now() + 10**10)
    base.send(sample_index=3)
    odometry = Odometry()
    odometry.twist.twist.linear.x = math.nan
    base.odom.publish(odometry)
    base.wait(lambda: base.follower.follower.counts["odometry_refused"], 5.0)
    base.listen(0.3)
    message, values = base.status()
    for reason in ("not_finite", "wrong_units", "wrong_dt", "from_future"):
        assert values[f"chunks_{reason}"] == "1"
    assert values["chunks_of_other_samples"] == values["odometry_refused"] == "1"
    assert "chunk refused (from_future)" in message
    assert "only others" in message
    assert set(base.speeds()) == {0}


def test_a_chunk_beyond_the_limit_of_rows_is_refused_and_counted(make_base):
    base = make_base(max_chunk_rows=60)
    base.activate()
    base.drive(seconds=6.0)
    for _ in range(3):
        base.send(seconds=6.1)
    base.wait(lambda: base.follower.follower.counts["too_long"] == 3)
    message, values = base.status()
    assert values["chunks_too_long"] == "3"
    assert "chunk refused (too_long): 61 rows, at most 60 (parameter max_chunk_rows)" in message


def test_the_chosen_sample_is_driven(make_base):
    base = make_base(sample_index=3)
    base.activate()
    base.send(acceleration=-1.0, sample_index=0)
    base.drive(sample_index=3)


def test_parameters_are_checked_and_those_of_the_topics_are_fixed_while_configured(base):
    def reason(name, value):
        (result,) = base.follower.set_parameters([Parameter(name, value=value)])
        return result.reason

    assert "out of range" in reason("max_speed", math.nan)
    assert reason("max_speed", 0.01 - 1e-10) == "max_speed must be from 0.01 to 50.0, got 0.0099999999"
    assert "TF frame" in reason("frame_id", "/base")
    assert "while the node is unconfigured" in reason("rate", 50.0)
    assert reason("max_speed", 0.3) == ""
    base.send()
    base.listen(1.0)
    assert base.speeds()[-1] == pytest.approx(0.3)


def test_every_parameter_is_described(base):
    described = base.follower.describe_parameters(list(SPECS))
    assert all(parameter.description.endswith(".") for parameter in described)


def test_a_signal_brakes_the_robot_before_the_process_ends(make_base, domain, tmp_path):
    from edgellm_ros.ros.processes import Child, ros_environment

    arguments = ["-m", "edgellm_ros.ros.follower.main", "--ros-args", "-p", "autostart:=true"]
    child = Child("follower", arguments, tmp_path / "log", ros_environment(domain))
    try:
        base = make_base(follower=False)
        base.wait(lambda: base.chunks.get_subscription_count() and base.commands)
        base.drive()
        child.process.send_signal(signal.SIGINT)
        assert child.process.wait(10) == 0
        base.listen(0.2)
        assert base.speeds()[-1] == 0
        assert "Traceback" not in child.log.read_text()
    finally:
        child.stop()
