# SPDX-License-Identifier: Apache-2.0
"""The controller's interpolation against closed forms, and limits of commands."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from edgellm_tabletop.episodes.controller import NANOSECONDS, TrajectoryController
from edgellm_tabletop.episodes.drivers import contract
from edgellm_tabletop.episodes.limits import check_limits
from edgellm_tabletop.episodes.robot import PERIOD_S, Record

START = 10 * NANOSECONDS
PERIOD_NS = NANOSECONDS // 50


def polynomial(times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions and speeds [N, 2] of cubic polynomials of time, in s."""
    coefficients = (np.array([0.3, -0.2, 0.5, -0.7]), np.array([-1.0, 0.4, 0.1, 0.6]))
    positions = np.stack([np.polynomial.polynomial.polyval(times, each) for each in coefficients], -1)
    slopes = [np.polynomial.polynomial.polyder(each) for each in coefficients]
    return positions, np.stack([np.polynomial.polynomial.polyval(times, each) for each in slopes], -1)


def stamps(seconds: np.ndarray) -> list[int]:
    return [START + round(each * NANOSECONDS) for each in seconds]


@pytest.fixture
def controller():
    return TrajectoryController(np.array([0.0, 0.0]))


def test_between_points_it_follows_the_cubic_of_positions_and_speeds(controller):
    knots = np.array([0.0, 0.3, 0.35, 1.0])
    controller.follow(START, stamps(knots), *polynomial(knots))
    times = np.linspace(0, 0.999, 97)
    found = [controller.at(stamp) for stamp in stamps(times)]
    for part, expected in enumerate(polynomial(times)):
        np.testing.assert_allclose([each[part] for each in found], expected, atol=1e-7)


def test_constant_acceleration_stays_constant_acceleration(controller):
    """What edgellm_arm sends: one acceleration in each period."""
    times = np.arange(6) * 0.02
    positions = np.stack([2.0 * times**2, -1.5 * times**2], -1)
    speeds = np.stack([4.0 * times, -3.0 * times], -1)
    controller.follow(START, stamps(times), positions, speeds)
    for time in np.linspace(0, 0.0999, 21):
        position, speed = controller.at(START + round(time * NANOSECONDS))
        np.testing.assert_allclose(position, [2.0 * time**2, -1.5 * time**2], atol=1e-9)
        np.testing.assert_allclose(speed, [4.0 * time, -3.0 * time], atol=1e-7)


def test_the_last_point_is_held_at_rest(controller):
    knots = np.array([0.0, 0.5])
    positions, speeds = polynomial(knots)
    controller.follow(START, stamps(knots), positions, speeds)
    for later in (0.5, 0.7, 100.0):
        position, speed = controller.at(START + round(later * NANOSECONDS))
        np.testing.assert_array_equal(position, positions[-1])
        assert not speed.any()


def test_points_of_the_past_are_dropped(controller):
    knots = np.arange(11) * 0.1
    now = START + round(0.52 * NANOSECONDS)
    controller.follow(now, stamps(knots), *polynomial(knots))
    for part, expected in enumerate(polynomial(np.array([0.55]))):
        np.testing.assert_allclose(
            controller.at(START + round(0.55 * NANOSECONDS))[part], expected[0], atol=1e-7
        )
    before = controller.at(START)
    controller.follow(now, stamps(knots[:5]), np.ones((5, 2)), np.zeros((5, 2)))  # all are past: ignored
    np.testing.assert_array_equal(controller.at(START), before)


def test_a_trajectory_of_the_future_begins_at_the_present_command(controller):
    controller.hold(np.array([1.0, 2.0]))
    controller.follow(START, [START + NANOSECONDS], np.array([[2.0, 0.0]]), np.zeros((1, 2)))
    np.testing.assert_array_equal(controller.at(START)[0], [1.0, 2.0])
    position, speed = controller.at(START + NANOSECONDS // 2)
    np.testing.assert_allclose(position, [1.5, 1.0])
    np.testing.assert_allclose(speed, [1.5, -3.0])


def test_a_new_trajectory_replaces_the_old_one(controller):
    knots = np.array([0.0, 1.0])
    controller.follow(START, stamps(knots), np.zeros((2, 2)), np.ones((2, 2)))
    controller.follow(START, stamps(knots), np.ones((2, 2)), np.zeros((2, 2)))
    np.testing.assert_array_equal(controller.at(START + 7)[0], [1.0, 1.0])


@pytest.mark.parametrize(
    ("times", "positions", "message"),
    [
        ([0.0, 0.0], np.zeros((2, 2)), "the times of a trajectory must increase"),
        ([0.0, 0.1], np.zeros((2, 3)), r"a trajectory of \(2, 3\) positions and \(2, 2\) speeds"),
        ([0.0, 0.1], np.full((2, 2), np.nan), "must have finite positions and speeds"),
    ],
)
def test_a_malformed_trajectory_is_refused(controller, times, positions, message):
    with pytest.raises(ValueError, match=message):
        controller.follow(START, stamps(np.array(times)), positions, np.zeros((2, 2)))


class TestLimits:
    """Commands of one joint whose acceleration rises and stays; the others stand."""

    def record(self, acceleration: float, seconds: float, rise: float = 0.06) -> Record:
        accelerations = acceleration * np.minimum(np.arange(round(seconds / PERIOD_S)) * PERIOD_S / rise, 1.0)
        positions, speeds = np.zeros((2, len(accelerations), 6))
        speeds[:, 1] = np.cumsum(accelerations) * PERIOD_S
        positions[:, 1] = np.cumsum(speeds[:, 1]) * PERIOD_S
        return Record(positions=list(positions), speeds=list(speeds))

    def test_the_largest_shares_are_those_of_the_motion(self):
        record = self.record(7.5, 0.21)
        found = check_limits(record, contract())
        assert found["largest_acceleration"] == pytest.approx(0.5)
        assert found["largest_jerk"] == pytest.approx(7.5 / 0.06 / 510)
        assert found["largest_speed"] == pytest.approx(record.speeds[-1][1] / 3)
        assert found["violations"] == 0

    @pytest.mark.parametrize(
        ("acceleration", "seconds", "rise"),
        [(15.1, 0.1, 0.06), (15.0, 0.26, 0.06), (15.0, 0.1, 0.02)],
        ids=["acceleration", "speed", "jerk"],
    )
    def test_commands_beyond_a_limit_are_counted(self, acceleration, seconds, rise):
        assert check_limits(self.record(acceleration, seconds, rise), contract())["violations"] > 0

    def test_a_jump_of_the_position_is_a_speed(self):
        record = self.record(1.0, 0.2)
        moved = [position + (0.04 if i > 9 else 0.0) for i, position in enumerate(record.positions)]
        assert check_limits(dataclasses.replace(record, positions=moved), contract())["violations"] == 1
