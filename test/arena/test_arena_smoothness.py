# SPDX-License-Identifier: Apache-2.0
"""Jerk and yaw acceleration of tracks whose values are known."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm_ros.arena.smoothness import jumps


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
