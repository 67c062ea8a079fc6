# SPDX-License-Identifier: Apache-2.0
"""The unicycle and the camera."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm_arena.world.camera import CAMERA, rays
from edgellm_arena.world.unicycle import (
    ACCEL_MIN,
    CURVATURE_MAX,
    DT,
    V_MAX,
    State,
    advance,
    rollout,
    step,
    to_base,
    to_world,
    wrap,
)


def test_constant_curvature_drives_a_circle():
    states = rollout(State(speed=0.5), np.tile([0.0, 2.0], (200, 1)))
    radius = np.hypot(states[:, 0], states[:, 1] - 0.5)
    np.testing.assert_allclose(radius, 0.5, atol=1e-12)


def test_path_does_not_depend_on_the_step_size():
    whole = advance(np.array([0.0, 0.0, 0.3, 0.4]), 0.0, 1.5, DT)
    halves = advance(advance(np.array([0.0, 0.0, 0.3, 0.4]), 0.0, 1.5, DT / 2), 0.0, 1.5, DT / 2)
    np.testing.assert_allclose(whole, halves, atol=1e-12)


def test_speed_stays_within_its_limits():
    assert step(State(speed=V_MAX), 1.0, 0.0).speed == V_MAX
    assert step(State(speed=0.05), -1.5, 0.0).speed == 0.0


def test_actions_beyond_the_limits_are_clipped():
    assert step(State(speed=0.5), -99.0, 99.0) == step(State(speed=0.5), ACCEL_MIN, CURVATURE_MAX)


def test_time_runs_backwards():
    before = np.array([1.0, -2.0, 0.7, 0.3])
    after = advance(before, 0.4, -1.1)
    np.testing.assert_allclose(advance(after, 0.4, -1.1, -DT), before, atol=1e-12)


def test_base_frame_is_forward_and_left():
    here = State(1.0, 2.0, np.pi / 2)
    np.testing.assert_allclose(to_base(here, np.array([1.0, 3.0])), [1.0, 0.0], atol=1e-12)
    np.testing.assert_allclose(to_base(here, np.array([0.0, 2.0])), [0.0, 1.0], atol=1e-12)
    points = np.random.default_rng(0).normal(size=(9, 2))
    np.testing.assert_allclose(to_world(here, to_base(here, points)), points, atol=1e-12)


@pytest.mark.parametrize(
    ("angle", "wrapped"), [(0.0, 0.0), (3 * np.pi, np.pi), (-np.pi, np.pi), (7.0, 7 - 2 * np.pi)]
)
def test_wrap(angle, wrapped):
    assert wrap(angle) == pytest.approx(wrapped)


def test_rays_and_projection_are_inverse():
    directions = rays(CAMERA)
    pixels = np.array([[10, 200], [160, 100], [310, 30]])
    points = np.stack([[CAMERA.x, 0, CAMERA.z] + 2.5 * directions[:, v, u] for u, v in pixels])
    found, depth = CAMERA.project(points)
    np.testing.assert_allclose(found, pixels + 0.5, atol=1e-3)
    np.testing.assert_allclose(depth, 2.5, atol=1e-5)


def test_camera_sees_what_is_left_on_the_left():
    pixels, _ = CAMERA.project_floor(np.array([[2.0, 0.5], [2.0, 0.0], [3.0, 0.0]]))
    assert pixels[0, 0] < pixels[1, 0] == pytest.approx(160)
    assert CAMERA.horizon < pixels[2, 1] < pixels[1, 1]
