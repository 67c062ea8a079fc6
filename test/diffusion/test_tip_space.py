# SPDX-License-Identifier: Apache-2.0
"""Targets of an arm's tip, which an X-VLA's processor makes of its actions."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm_ros.diffusion.affine_space import TipActionSpace, axis_angles
from edgellm_ros.diffusion.policy_config import TARGET, TipSpaceConfig


def space(is_target: bool, dim: int = TARGET, model_dim: int = 20) -> TipActionSpace:
    values = {"offset": (1.0,) * dim, "scale": (2.0,) * dim, "shift": (0.0,) * dim}
    names = tuple(f"action_{i}" for i in range(dim))
    return TipActionSpace(
        TipSpaceConfig(
            names=names, units=("",) * dim, dt=0.1, horizon=4, model_dim=model_dim, relative=(False,) * dim,
            is_target=is_target, **values,
        )
    )  # fmt: skip


def columns_of(vectors: np.ndarray) -> np.ndarray:
    """Two columns [n,6] of the matrices of axes times angles [n,3].

    The matrices are those of Rodrigues' formula.
    """
    angles = np.linalg.norm(vectors, axis=1)[:, None, None]
    x, y, z = (vectors / np.maximum(angles[:, 0], 1e-300)).T
    zero = np.zeros_like(x)
    cross = np.stack([zero, -z, y, z, zero, -x, -y, x, zero], axis=1).reshape(-1, 3, 3)
    matrices = np.eye(3) + np.sin(angles) * cross + (1 - np.cos(angles)) * cross @ cross
    return np.concatenate([matrices[..., 0], matrices[..., 1]], axis=-1)


def test_axes_and_angles_are_those_of_the_rotation():
    rng = np.random.default_rng(0)
    axes = rng.normal(size=(200, 3))
    angles = np.concatenate([rng.uniform(0, np.pi, 194), [0, 1e-7, 1e-3, 3.14, np.pi - 1e-5, 1.0]])
    vectors = axes / np.linalg.norm(axes, axis=1, keepdims=True) * angles[:, None]
    np.testing.assert_allclose(axis_angles(columns_of(vectors)), vectors, atol=1e-5)


def test_columns_need_not_be_orthogonal_or_of_length_1():
    vectors = np.array([[0.3, -0.2, 1.0], [0.0, 2.0, 0.1]])
    columns = columns_of(vectors)
    skewed = np.concatenate([3 * columns[:, :3], columns[:, 3:] + 0.4 * columns[:, :3]], axis=-1)
    np.testing.assert_allclose(axis_angles(skewed), vectors, atol=1e-5)


def test_a_target_is_a_point_an_axis_with_its_angle_and_a_gripper_that_is_open_or_closed():
    values = np.zeros((2, 4, 20), np.float32)
    values[..., :3], values[..., 3:9] = [1, 2, 3], [1, 0, 0, 0, 1, 0]
    values[0, :, 9], values[1, :, 9] = 0.51, 0.5
    found = space(is_target=True).denormalise(values)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found[0, 0], [1, 2, 3, 0, 0, 0, 1])
    np.testing.assert_array_equal(found[1, 0], [1, 2, 3, 0, 0, 0, -1])


def test_other_actions_are_scaled_and_shifted():
    values = np.arange(20, dtype=np.float32)[None]
    np.testing.assert_array_equal(space(is_target=False).denormalise(values)[0], np.arange(7) * 2 + 1)


@pytest.mark.parametrize(("dim", "model_dim"), [(6, 20), (7, 9)])
def test_a_target_of_other_sizes_is_an_error(dim, model_dim):
    with pytest.raises(ValueError, match="a target has 7 values of at least 10 of the model"):
        space(is_target=True, dim=dim, model_dim=model_dim)
