# SPDX-License-Identifier: Apache-2.0
import dataclasses

import numpy as np
import pytest

from edgellm_ros.diffusion.action_space import UnicycleActionSpace
from edgellm_ros.diffusion.config import ActionSpaceConfig

CONFIG = ActionSpaceConfig(
    type="unicycle",
    names=("acceleration", "curvature"),
    units=("m/s^2", "1/m"),
    dt=0.1,
    horizon=40,
    mean=(0.1, -0.2),
    std=(0.5, 2.0),
    low=(-1.5, -2.5),
    high=(1.0, 2.5),
)
SPACE = UnicycleActionSpace(CONFIG)


def drive(acceleration, curvature, speed, steps=40) -> np.ndarray:
    actions = np.broadcast_to(np.array([acceleration, curvature], np.float32), (1, steps, 2))
    return SPACE.integrate(actions, speed)[0]


def test_denormalised_actions_are_scaled_shifted_and_limited():
    values = np.array([[0.0, 0.0], [1.0, 1.0], [9.0, -9.0]], np.float32)
    np.testing.assert_allclose(SPACE.denormalise(values), [[0.1, -0.2], [0.6, 1.8], [1.0, -2.5]], rtol=1e-6)


def test_without_curvature_the_path_is_straight_with_the_analytic_distance():
    states = drive(0.2, 0.0, 0.3)
    time = np.arange(41) * 0.1
    np.testing.assert_allclose(states[:, 0], 0.3 * time + 0.1 * time**2, atol=1e-6)
    np.testing.assert_allclose(states[:, 1:3], 0, atol=1e-9)
    np.testing.assert_allclose(states[:, 3], 0.3 + 0.2 * time, atol=1e-6)


def test_constant_curvature_stays_on_its_circle():
    states = drive(0.0, 2.0, 0.5)
    centre = np.array([0.0, 0.5])
    np.testing.assert_allclose(np.linalg.norm(states[:, :2] - centre, axis=1), 0.5, atol=1e-6)
    np.testing.assert_allclose(states[:, 2], np.arange(41) * 0.1, atol=1e-6)  # 0.5 m/s * 2 1/m, to the left


def test_braking_ends_at_a_standstill_within_the_step():
    states = drive(-1.0, 0.0, 0.25)
    np.testing.assert_allclose(states[:4, 3], [0.25, 0.15, 0.05, 0.0], atol=1e-6)
    np.testing.assert_allclose(states[3:, 0], 0.25**2 / 2, atol=1e-6)
    assert (states[:, 3] >= 0).all()


@pytest.mark.slow
def test_a_path_equals_fine_numerical_integration():
    rng = np.random.default_rng(0)
    actions = np.stack([rng.uniform(-1.5, 1.0, (5, 40)), rng.uniform(-2.5, 2.5, (5, 40))], axis=-1)
    states = SPACE.integrate(actions, 0.4)
    substeps = 2000
    for sample in range(5):
        x = y = heading = 0.0
        speed = 0.4
        for step in range(40):
            acceleration, curvature = actions[sample, step]
            for _ in range(substeps):
                slower = max(speed + acceleration * 0.1 / substeps, 0.0)
                distance = 0.5 * (speed + slower) * 0.1 / substeps
                x += distance * np.cos(heading + curvature * distance / 2)
                y += distance * np.sin(heading + curvature * distance / 2)
                heading += curvature * distance
                speed = slower
        np.testing.assert_allclose(states[sample, -1], [x, y, heading, speed], atol=1e-4)


def test_a_robot_does_not_start_backwards():
    assert drive(0.0, 0.0, -0.5)[:, 0].tolist() == [0.0] * 41


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": "holonomic"}, "type must be 'unicycle', got 'holonomic'"),
        ({"names": ("speed", "curvature")}, "unicycle's names are"),
        ({"mean": (0.0,)}, "mean must have 2 values"),
        ({"std": (1.0, 0.0)}, "std must be positive"),
        ({"dt": 0.0}, "dt must be positive"),
        ({"low": (2.0, -1.0)}, "low must be below high"),
    ],
)
def test_a_wrong_action_space_is_an_error_that_names_the_value(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)
