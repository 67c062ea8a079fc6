# SPDX-License-Identifier: Apache-2.0
"""Odometry to trajectory history."""

from __future__ import annotations

import math
import re
import threading
import time

import numpy as np
import pytest
from nav_msgs.msg import Odometry

from edgellm_ros.ros.node.input_time import StaleInputError
from edgellm_ros.ros.node.odometry import OdometryBuffer


def odometry(t: float, x: float = 0.0, y: float = 0.0, heading: float = 0.0, speed: float = 0.0) -> Odometry:
    message = Odometry()
    message.header.stamp.sec, message.header.stamp.nanosec = int(t), round((t - int(t)) * 1e9)
    message.pose.pose.position.x, message.pose.pose.position.y = x, y
    message.pose.pose.orientation.z, message.pose.pose.orientation.w = (
        math.sin(heading / 2),
        math.cos(heading / 2),
    )
    message.twist.twist.linear.x = speed
    return message


def filled(*messages: Odometry) -> OdometryBuffer:
    buffer = OdometryBuffer()
    for message in messages:
        buffer.add(message)
    return buffer


def history(buffer: OdometryBuffer, stamp: float, num_points: int = 4):
    return buffer.state_at(stamp, num_points, 0.1, max_age=1.0)


class TestHistory:
    def test_is_interpolated_at_the_stamp(self):
        buffer = filled(*(odometry(10 + 0.08 * i, x=0.08 * i, speed=1.0) for i in range(11)))
        poses, speed = history(buffer, 10.63)
        np.testing.assert_allclose(poses[:, 0], [-0.3, -0.2, -0.1, 0.0], atol=1e-6)
        np.testing.assert_allclose(poses[:, 1:], 0, atol=1e-9)
        assert speed == pytest.approx(1.0)

    def test_is_seen_from_the_present_pose(self):
        buffer = filled(*(odometry(10 + 0.1 * i, x=5.0, y=0.1 * i, heading=math.pi / 2) for i in range(6)))
        poses, _ = history(buffer, 10.5)
        np.testing.assert_allclose(poses, [[-0.3, 0, 0], [-0.2, 0, 0], [-0.1, 0, 0], [0, 0, 0]], atol=1e-6)

    def test_heading_is_interpolated_across_pi(self):
        buffer = filled(odometry(10.0, heading=3.1), odometry(10.4, heading=3.1 + 0.4))
        poses, _ = history(buffer, 10.4)
        np.testing.assert_allclose(poses[:, 2], [-0.3, -0.2, -0.1, 0], atol=1e-6)

    def test_stands_still_before_the_first_sample(self):
        buffer = filled(odometry(10.0, x=1.0), odometry(10.1, x=1.1))
        poses, _ = history(buffer, 10.1)
        np.testing.assert_allclose(poses[:, 0], [-0.1, -0.1, -0.1, 0.0], atol=1e-6)

    def test_is_none_without_odometry(self):
        assert history(OdometryBuffer(), 10.0) == (None, None)

    def test_negative_speed_is_standing(self):
        assert history(filled(odometry(10.0, speed=-0.3)), 10.0)[1] == 0.0

    def test_ends_at_the_newest_sample_if_the_frame_is_a_little_newer(self):
        buffer = filled(*(odometry(10 + 0.1 * i, x=0.1 * i, speed=1.0) for i in range(6)))
        poses, _ = history(buffer, 10.55)
        np.testing.assert_allclose(poses[-1], 0)
        np.testing.assert_allclose(poses[-2, 0], -0.05, atol=1e-6)

    def test_odometry_that_stopped_is_an_error(self):
        with pytest.raises(
            StaleInputError, match=r"the newest odometry is 2\.00 s older than the frame, limit 1 s"
        ):
            history(filled(odometry(10.0)), 12.0)

    def test_the_newest_state_is_an_error_when_it_is_old(self):
        buffer = filled(odometry(10.0), odometry(10.1, x=0.1, speed=1.0))
        poses, speed = buffer.newest_state(round(11e9), 4, 0.1, max_age=1.0)
        np.testing.assert_allclose(poses[:, 0], [-0.1, -0.1, -0.1, 0.0], atol=1e-6)
        assert speed == pytest.approx(1.0)
        with pytest.raises(StaleInputError, match=r"the newest odometry is 1\.90 s old, limit 1 s"):
            buffer.newest_state(round(12e9), 4, 0.1, max_age=1.0)


def set_field(message: Odometry, field: str, value: float) -> None:
    *path, last = field.split(".")
    for name in path:
        message = getattr(message, name)
    setattr(message, last, value)


class TestMessages:
    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize(
        "field", ["pose.pose.position.x", "pose.pose.orientation.w", "twist.twist.linear.x"]
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
            buffer.add(odometry(0.0, x=0.1 * step), arrival=10_000_000_000 + step * 100_000_000)
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
