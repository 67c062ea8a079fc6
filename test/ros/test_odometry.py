# SPDX-License-Identifier: Apache-2.0
"""Odometry to trajectory history."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from nav_msgs.msg import Odometry

from edgellm_ros.ros.node.sensors.input_time import StaleInputError
from edgellm_ros.ros.node.sensors.odometry import OdometryBuffer
from edgellm_ros.ros.node.sensors.past_motion import past_motion


def odometry(
    t: float,
    x: float = 0.0,
    y: float = 0.0,
    heading: float = 0.0,
    speed: float = 0.0,
    sideways: float = 0.0,
) -> Odometry:
    message = Odometry()
    message.header.stamp.sec, message.header.stamp.nanosec = int(t), round((t - int(t)) * 1e9)
    message.pose.pose.position.x, message.pose.pose.position.y = x, y
    message.pose.pose.orientation.z, message.pose.pose.orientation.w = (
        math.sin(heading / 2),
        math.cos(heading / 2),
    )
    message.twist.twist.linear.x, message.twist.twist.linear.y = speed, sideways
    return message


def filled(*messages: Odometry) -> OdometryBuffer:
    buffer = OdometryBuffer()
    for message in messages:
        buffer.add(message)
    return buffer


def history(buffer: OdometryBuffer, stamp: float, num_points: int = 4) -> tuple[np.ndarray, float]:
    motion = buffer.state_at(stamp, num_points, 0.1, max_age=1.0)
    return motion.history, motion.speed


class TestHistory:
    def test_is_interpolated_at_the_stamp(self):
        buffer = filled(*(odometry(10 + 0.08 * i, x=0.08 * i, speed=1.0) for i in range(11)))
        poses, speed = history(buffer, 10.63)
        np.testing.assert_allclose(poses[:, 0], [-0.3, -0.2, -0.1, 0.0], atol=1e-6)
        np.testing.assert_allclose(poses[:, 1:], 0, atol=1e-9)
        assert speed == pytest.approx(1.0)

    def test_does_not_depend_on_what_was_long_before(self):
        drive = [odometry(10 + 0.07 * i, x=0.05 * i, heading=0.1 * i, speed=0.7) for i in range(100)]
        long, short = filled(*drive), filled(*drive[-10:])
        for stamp in (16.9, 16.93, 17.5):
            for found, expected in zip(history(long, stamp), history(short, stamp), strict=True):
                np.testing.assert_allclose(found, expected, atol=1e-12)

    def test_is_seen_from_the_present_pose(self):
        buffer = filled(
            *(odometry(10 + 0.1 * i, x=5.0, y=0.1 * i, heading=math.pi / 2, speed=1.0) for i in range(6))
        )
        poses, _ = history(buffer, 10.5)
        np.testing.assert_allclose(poses, [[-0.3, 0, 0], [-0.2, 0, 0], [-0.1, 0, 0], [0, 0, 0]], atol=1e-6)

    def test_heading_is_interpolated_across_pi(self):
        buffer = filled(odometry(10.0, heading=3.1), odometry(10.4, heading=3.1 + 0.4))
        poses, _ = history(buffer, 10.4)
        np.testing.assert_allclose(poses[:, 2], [-0.3, -0.2, -0.1, 0], atol=1e-6)

    def test_is_straight_at_the_first_speed_before_the_first_sample(self):
        buffer = filled(odometry(10.0, x=1.0, speed=1.0), odometry(10.1, x=1.1, speed=1.0))
        poses, _ = history(buffer, 10.1)
        np.testing.assert_allclose(poses[:, 0], [-0.3, -0.2, -0.1, 0.0], atol=1e-6)

    def test_is_a_standstill_before_the_first_sample_of_a_standing_robot(self):
        np.testing.assert_array_equal(history(filled(odometry(10.0, x=1.0)), 10.0)[0], np.zeros((4, 3)))

    def test_is_none_without_odometry(self):
        assert OdometryBuffer().state_at(10.0, 4, 0.1, max_age=1.0) is None

    def test_negative_speed_is_standing(self):
        assert history(filled(odometry(10.0, speed=-0.3)), 10.0)[1] == 0.0

    def test_goes_on_at_the_newest_speed_if_the_frame_is_a_little_newer(self):
        """Odometry that is late must not look like a robot that brakes."""
        buffer = filled(*(odometry(10 + 0.1 * i, x=0.1 * i, speed=1.0) for i in range(6)))
        poses, speed = history(buffer, 10.55)
        np.testing.assert_allclose(poses[:, 0], [-0.3, -0.2, -0.1, 0.0], atol=1e-6)
        assert speed == pytest.approx(1.0)

    def test_odometry_that_stopped_is_an_error(self):
        with pytest.raises(
            StaleInputError, match=r"the newest odometry is 2\.00 s older than the frame, limit 1 s"
        ):
            history(filled(odometry(10.0)), 12.0)

    def test_the_newest_state_is_an_error_when_it_is_old(self):
        buffer = filled(odometry(10.0), odometry(10.1, x=0.1, speed=1.0))
        motion = buffer.newest_state(round(11e9), 4, 0.1, max_age=1.0)
        assert motion.speed == pytest.approx(1.0)
        with pytest.raises(StaleInputError, match=r"the newest odometry is 1\.90 s old, limit 1 s"):
            buffer.newest_state(round(12e9), 4, 0.1, max_age=1.0)


SECONDS, POINTS, DT = 0.7, 8, 0.1  # of the demo's trajectory history
TOLERANCE = 0.05  # the default of odom_tolerance


def test_the_first_history_of_a_process_imports_nothing():
    program = """
import sys
import numpy as np
from edgellm_ros.ros.node.sensors.past_motion import past_motion
before = set(sys.modules)
past_motion(np.array([[9.0, 0, 0, 3, 1, 0], [10.0, 1, 0, -3, 2, 0]]), 10.0, 4, 0.1)
print(sorted(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def drive(
    poses: float = 0.6, twist: float = 0.6, turning: float = 0.0, jump: tuple[float, float] = (0, 0)
) -> OdometryBuffer:
    """2 s of odometry at 20 Hz with a speed by poses and one by twist.

    The poses jump 0.3 s before the end.
    """
    buffer = OdometryBuffer()
    x = y = heading = 0.0
    for i in range(41):
        buffer.add(odometry(10 + 0.05 * i, x, y, math.remainder(heading, math.tau), twist))
        middle = heading + 0.025 * turning
        chord = 0.05 * poses * np.sinc(0.025 * turning / math.pi)
        x, y, heading = x + chord * math.cos(middle), y + chord * math.sin(middle), heading + 0.05 * turning
        if i == 34:
            x, y = x + jump[0], y + jump[1]
    return buffer


def verdict(buffer: OdometryBuffer, tolerance: float = TOLERANCE) -> str:
    """What the node makes of it: nothing, a warning, or no trajectories."""
    agreement = buffer.state_at(12.0, POINTS, DT, max_age=1.0).agreement
    if not agreement.problem(tolerance):
        return "driven"
    return "refused" if agreement.refused(tolerance) else "warned"


class TestAgreement:
    """Poses and twist tell the same motion; docs/ros_interfaces.md has this table."""

    @pytest.mark.parametrize(
        "case, expected",
        [
            (dict(), "driven"),
            (dict(poses=0.54), "warned"),
            (dict(poses=0.0), "refused"),
            (dict(twist=0.0), "refused"),
            (dict(poses=0.66), "warned"),
            (dict(jump=(0.3, 0.0)), "warned"),
            (dict(jump=(0.0, 1.0)), "warned"),
            (dict(jump=(1.0, 0.0)), "refused"),
            (dict(jump=(-1.0, 0.0)), "refused"),
        ],
    )
    def test_a_difference_is_warned_of_or_refused(self, case, expected):
        assert verdict(drive(**case)) == expected

    @pytest.mark.parametrize(
        "case",
        [
            dict(turning=1.5),
            dict(poses=0.0, twist=0.0),
            dict(poses=0.0, twist=0.0, turning=2.0),
            dict(poses=-0.3, twist=-0.3),
            dict(poses=-0.3, twist=-0.3, turning=-1.0),
        ],
    )
    def test_turns_standstill_and_reverse_agree(self, case):
        assert verdict(drive(**case)) == "driven"

    @pytest.mark.parametrize("speed", [0.0, 0.1, 0.6])
    def test_noise_of_a_centimetre_is_not_refused(self, speed):
        noise = np.random.default_rng(0).normal(0, 0.01, (200, 41, 2))
        for offsets in noise:
            buffer = filled(
                *(
                    odometry(10 + 0.05 * i, 0.05 * i * speed + x, y, speed=speed)
                    for i, (x, y) in enumerate(offsets)
                )
            )
            assert verdict(buffer) != "refused"

    def test_a_twist_that_is_a_tenth_of_a_second_late_is_not_refused(self):
        """A robot that sets off with 1 m/s^2."""
        for end in range(41):
            buffer = OdometryBuffer()
            for i in range(end + 1):
                t = max(0.0, 0.05 * i - 0.5)
                buffer.add(odometry(10 + 0.05 * i, x=t * t / 2, speed=max(0.0, t - 0.1)))
            motion = buffer.state_at(10 + 0.05 * end, POINTS, DT, max_age=1.0)
            assert not motion.agreement.refused(TOLERANCE)

    def test_motion_to_the_side_is_that_of_the_twist(self):
        samples = [odometry(10 + 0.05 * i, y=0.02 * i, sideways=0.4) for i in range(41)]
        assert verdict(filled(*samples)) == "driven"

    def test_a_short_history_is_compared_where_there_are_samples(self):
        samples = [odometry(10 + 0.05 * i, speed=0.6) for i in range(5)]
        motion = filled(*samples[:1]).state_at(10.0, POINTS, DT, max_age=1.0)
        assert motion.agreement.difference == 0
        motion = filled(*samples).state_at(10.2, POINTS, DT, max_age=1.0)
        assert motion.agreement.refused(TOLERANCE)

    @pytest.mark.parametrize(
        "case",
        [dict(poses=0.54), dict(poses=0.0), dict(poses=0.66), dict(jump=(0.3, -0.5)), dict(turning=1.0)],
    )
    def test_the_history_has_the_speed_of_the_twist(self, case):
        """A model that brakes by what it sees in the history then stops the robot."""
        motion = drive(**case).state_at(12.0, POINTS, DT, max_age=1.0)
        steps = np.linalg.norm(np.diff(motion.history[:, :2], axis=0), axis=1)
        np.testing.assert_allclose(steps / DT, motion.speed, rtol=1e-3)

    def test_the_twist_is_integrated_along_the_headings(self):
        """Where poses and twist agree both ways give the same history."""
        true = drive(turning=1.0).state_at(12.0, POINTS, DT, max_age=1.0)
        off = drive(poses=0.5, turning=1.0).state_at(12.0, POINTS, DT, max_age=1.0)
        assert off.agreement.difference > 0.09
        np.testing.assert_allclose(off.history, true.history, atol=1e-4)

    def test_poses_that_agree_are_the_history_to_the_last_bit(self):
        """The reference is NumPy's interpolation of the poses."""
        rng = np.random.default_rng(1)
        times = np.cumsum(rng.uniform(0.03, 0.07, 60))
        speeds = 0.5 + 0.1 * np.sin(times)
        x = 3.0 + 0.5 * times - 0.1 * np.cos(times)
        zeros = np.zeros(60)
        motion = past_motion(np.column_stack([times, x, zeros, zeros, speeds, zeros]), 2.0, POINTS, DT)
        expected = np.interp(2.0 + DT * np.arange(1 - POINTS, 1), times, x)
        assert motion.agreement.difference < 0.01
        np.testing.assert_array_equal(motion.history[:, 0], expected - expected[-1])

    def test_the_problem_names_both_speeds_and_the_parameter(self):
        agreement = drive(poses=0.0).state_at(12.0, POINTS, DT, max_age=1.0).agreement
        assert agreement.problem(TOLERANCE) == (
            "poses and twist of the odometry differ by 0.60 m/s, limit 0.05 m/s (parameter odom_tolerance): "
            "in the last 0.7 s the mean speed is 0.00 m/s by pose.pose and 0.60 m/s by twist.twist.linear"
        )

    def test_a_large_tolerance_takes_everything(self):
        assert verdict(drive(poses=0.0), tolerance=1.0) == "driven"


def set_field(message: Odometry, field: str, value: float) -> None:
    *path, last = field.split(".")
    for name in path:
        message = getattr(message, name)
    setattr(message, last, value)


class TestMessages:
    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize(
        "field",
        ["pose.pose.position.x", "pose.pose.orientation.w", "twist.twist.linear.x", "twist.twist.linear.y"],
    )
    def test_not_finite_is_refused_by_name_until_a_good_one_comes(self, field, value):
        buffer = filled(odometry(10.0))
        bad = odometry(10.1)
        set_field(bad, field, value)
        with pytest.raises(ValueError, match=f"odometry is not finite: {field} is {value}"):
            buffer.add(bad)
        with pytest.raises(ValueError, match=field):
            history(buffer, 10.1)
        assert field in buffer.problem
        buffer.add(odometry(10.2))
        assert history(buffer, 10.2)[0] is not None

    @pytest.mark.parametrize(
        "field, value, words",
        [
            ("pose.pose.orientation.w", 1e200, "the quaternion's length is 1e+200, expected 1"),
            ("pose.pose.position.x", -1e300, "pose.pose.position.x is -1e+300, limit 1e+09"),
            ("twist.twist.linear.x", 1e39, "twist.twist.linear.x is 1e+39, limit 10000"),
        ],
    )
    def test_a_huge_number_is_refused_as_a_bad_value(self, field, value, words):
        bad = odometry(10.0)
        set_field(bad, field, value)
        with pytest.raises(ValueError, match=re.escape(words)):
            filled(bad)

    def test_without_a_stamp_is_dated_by_its_arrival(self):
        buffer = OdometryBuffer()
        for step in range(4):
            buffer.add(odometry(0.0, 0.1 * step, speed=1.0), arrival=10_000_000_000 + step * 100_000_000)
        assert buffer.newest_stamp == pytest.approx(10.3)
        np.testing.assert_allclose(history(buffer, 10.3)[0][:, 0], [-0.3, -0.2, -0.1, 0.0], atol=1e-6)

    def test_a_stamp_in_the_future_is_refused_beyond_the_tolerance(self):
        buffer = OdometryBuffer()
        buffer.add(odometry(10.5), arrival=10_000_000_000, tolerance_s=0.5)
        with pytest.raises(ValueError, match=r"odometry is stamped 0\.60 s in the future, limit 0\.5 s"):
            buffer.add(odometry(10.6), arrival=10_000_000_000, tolerance_s=0.5)
        assert buffer.newest_stamp == pytest.approx(10.5)

    def test_without_an_orientation_is_refused(self):
        bad = odometry(10.0)
        bad.pose.pose.orientation.w = 0.0
        with pytest.raises(ValueError, match="the quaternion's length is 0, expected 1"):
            filled(bad)

    def test_backward_jump_of_time_starts_a_new_history(self):
        buffer = filled(odometry(100.0, x=50.0), odometry(3.0, x=1.0))
        assert buffer.newest_stamp == pytest.approx(3.0)
        np.testing.assert_allclose(history(buffer, 3.0)[0], 0)

    def test_a_long_pause_starts_a_new_history(self):
        buffer = filled(odometry(10.0, x=0.0), odometry(15.0, x=9.0))
        np.testing.assert_allclose(history(buffer, 15.0)[0], 0)

    def test_a_late_message_is_dropped(self):
        buffer = filled(odometry(10.0), odometry(10.1, x=0.1), odometry(10.05, x=7.0))
        assert np.abs(history(buffer, 10.1)[0]).max() <= 0.1 + 1e-9


class TestWaiting:
    def test_ends_when_odometry_reaches_the_stamp(self):
        buffer = filled(odometry(10.0))
        timer = threading.Timer(0.05, lambda: buffer.add(odometry(10.2)))
        start = time.monotonic()
        timer.start()
        buffer.wait_until(10.2, timeout_s=10.0)
        assert time.monotonic() - start < 5.0
        assert buffer.newest_stamp == pytest.approx(10.2)

    def test_ends_after_the_timeout(self):
        start = time.monotonic()
        filled(odometry(10.0)).wait_until(11.0, timeout_s=0.05)
        assert 0.04 < time.monotonic() - start < 5.0

    def test_does_not_wait_without_a_publisher(self):
        start = time.monotonic()
        OdometryBuffer().wait_until(10.0, timeout_s=10.0)
        assert time.monotonic() - start < 5.0
