# SPDX-License-Identifier: Apache-2.0
"""Jerk and yaw acceleration of tracks whose values are known."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm_arena.driving.smoothness import excess_jumps, jumps


def track(speeds, headings) -> np.ndarray:
    return np.stack([np.zeros(len(speeds)), np.zeros(len(speeds)), headings, speeds], 1)


def test_jumps_are_those_of_acceleration_and_yaw_rate_over_the_step():
    # accelerations 1, 1, 0, -0.5 m/s^2; yaw rates 0.1, 0.1, 0.3, 0.2 rad/s
    states = track([0, 0.1, 0.2, 0.2, 0.15], [0, 0.01, 0.02, 0.05, 0.07])
    changes, within = jumps(states, [0, 0, 1, 1])
    assert changes.jerk == pytest.approx([10.0])
    assert changes.yaw_acceleration == pytest.approx([2.0])
    assert within.jerk == pytest.approx([0.0, 5.0])
    assert within.yaw_acceleration == pytest.approx([0.0, 1.0])


def test_the_start_of_the_first_plan_is_no_change():
    changes, within = jumps(track([0, 0, 0.1, 0.2], [0, 0, 0, 0]), [None, 0, 0])
    assert changes.jerk.size == 0
    assert within.jerk == pytest.approx([0.0])


def test_braking_after_a_plan_and_the_plan_after_it_are_changes():
    # accelerations 1, -1, -0.5, 0, 0.5
    changes, within = jumps(track([0.2, 0.3, 0.2, 0.15, 0.15, 0.2], np.zeros(6)), [0, None, None, None, 1])
    assert changes.jerk == pytest.approx([20.0, 5.0])
    assert within.jerk.size == 0


def test_a_turn_through_the_back_is_no_jump():
    changes, _ = jumps(track([0.1] * 3, [np.pi - 0.01, -np.pi + 0.01, -np.pi + 0.03]), [0, 1])
    assert changes.yaw_acceleration == pytest.approx([0.0], abs=1e-9)


def test_as_many_drivers_as_steps_are_needed():
    with pytest.raises(ValueError, match="2 drivers for 3 steps"):
        jumps(track([0, 0, 0, 0], [0, 0, 0, 0]), [0, 0])


def test_the_excess_is_what_the_old_plan_would_not_have_done():
    # Speed 0.2 m/s: the new plan goes to 0.25 (0.5 m/s^2), the old one would go to 0.21 (0.1 m/s^2).
    # Turned by 0.02 (0.2 rad/s); the old curvature of 0.5/m over 0.0205 m would turn by 0.01025.
    states = track([0.2, 0.25, 0.3], [0, 0.02, 0.04])
    excess = excess_jumps(states, {0: (0.1, 0.5)})
    assert excess.jerk == pytest.approx([4.0])
    assert excess.yaw_acceleration == pytest.approx([0.975])


def test_a_plan_that_goes_on_as_the_old_one_has_no_excess():
    states = track([0.2, 0.25, 0.3], [0, 0, 0])
    assert excess_jumps(states, {1: (0.5, 0.0)}).jerk == pytest.approx([0.0])


def test_the_excess_is_within_the_limits_of_the_robot():
    states = track([0.2, 0.3], [0, 0])  # 1 m/s^2, the most that it can
    assert excess_jumps(states, {0: (9.0, 0.0)}).jerk == pytest.approx([0.0])


def test_a_takeover_after_the_last_step_has_no_excess():
    assert excess_jumps(track([0.2, 0.3], [0, 0]), {1: (1.0, 0.0)}).jerk.size == 0


def test_a_robot_that_stands_makes_no_jumps():
    states = track([0.1, 0.0, 0.0, 0.0, 0.0], np.zeros(5))
    changes, within = jumps(states, [0, 1, 2, 2])
    assert changes.jerk == pytest.approx([10.0])  # as it comes to rest, and not the change after it
    assert within.jerk.size == 0
    assert excess_jumps(states, {1: (0.0, 0.5)}).jerk.size == 0
