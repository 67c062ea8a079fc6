# SPDX-License-Identifier: Apache-2.0
import dataclasses

import numpy as np
import pytest

from edgellm_ros.diffusion.config import TrajectoryHistoryConfig
from edgellm_ros.diffusion.trajectory_history import check_history, history_speed, history_tokens

CONFIG = TrajectoryHistoryConfig(
    num_points=4,
    dt=0.1,
    axes=("x", "y"),
    low=(-1.0, -1.0),
    high=(1.0, 1.0),
    num_tokens=1000,
    first_token_id=5000,
    single_precision=False,
)


def test_the_first_point_is_absolute_and_the_others_are_differences():
    points = np.array([[-0.3, 0.1], [-0.2, 0.1], [-0.1, 0.05], [0.0, 0.0]])
    values = np.array([[-0.3, 0.1], [0.1, 0.0], [0.1, -0.05], [0.1, -0.05]])
    expected = 5000 + np.round((values + 1) / 2 * 999).astype(int)
    assert history_tokens(points, CONFIG) == expected.reshape(-1).tolist()


def test_standing_still_is_the_middle_bin_with_halves_rounded_to_even():
    assert history_tokens(check_history(None, CONFIG), CONFIG) == [5500] * 8  # 499.5 -> 500


def test_only_single_precision_takes_a_tiny_step_back_for_none():
    """No step is in the middle between two bins.

    Alpamayo's model code computes in fp32, the training of the demo's model in fp64.
    """
    points = np.zeros((4, 2))
    points[:, 0] = [0, -1e-9, 0, 1e-9]
    single = dataclasses.replace(CONFIG, single_precision=True)
    assert history_tokens(points, CONFIG)[::2] == [5500, 5499, 5500, 5500]
    assert history_tokens(points, single)[::2] == [5500] * 4


def test_without_a_history_the_robot_drove_straight_on_at_its_speed():
    points = check_history(None, CONFIG, speed=0.6)
    np.testing.assert_allclose(points, [[-0.18, 0], [-0.12, 0], [-0.06, 0], [0, 0]])
    assert history_speed(points, CONFIG) == pytest.approx(0.6)


def test_values_out_of_range_take_the_outermost_bin():
    points = np.array([[-9.0, 9.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    assert history_tokens(points, CONFIG)[:4] == [5000, 5999, 5999, 5000]


def test_headings_are_accepted_and_ignored():
    poses = np.array([[-0.3, 0.0, 0.1], [-0.2, 0.0, 0.1], [-0.1, 0.0, 0.1], [0.0, 0.0, 0.0]])
    np.testing.assert_array_equal(check_history(poses, CONFIG), poses[:, :2])


def test_speed_is_that_of_the_last_interval():
    points = np.array([[-9.0, 0.0], [-0.2, 0.0], [-0.03, 0.04], [0.0, 0.0]])
    assert history_speed(points, CONFIG) == pytest.approx(0.5)


@pytest.mark.parametrize("shape", [(3, 2), (4, 4), (8,)])
def test_a_wrong_shape_is_an_error_that_names_it(shape):
    with pytest.raises(ValueError, match=r"must have shape \[4, 2 or 3\], got"):
        check_history(np.zeros(shape), CONFIG)


def test_values_that_are_not_finite_are_an_error():
    with pytest.raises(ValueError, match="not finite"):
        check_history(np.full((4, 2), np.nan), CONFIG)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"axes": ("y", "x")}, "axes must be"),
        ({"axes": ("x", "y", "z")}, "low and high must have 3 values"),
        ({"num_points": 1}, "num_points and num_tokens must be at least 2"),
        ({"low": (-1.0,)}, "low and high must have 2 values"),
        ({"high": (-1.0, 1.0)}, "low must be below high"),
    ],
)
def test_a_wrong_configuration_is_an_error_that_names_the_value(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)
