# SPDX-License-Identifier: Apache-2.0
"""The action spaces of policies but GR00T.

A space has names, units and statistics of each value, and no path.

Source of `TipActionSpace`: LeRobot 0.6.1, policies/xvla/processor_xvla.py and utils.py.
"""

from __future__ import annotations

import numpy as np

from edgellm_ros.diffusion.groot_config import LimitedStateConfig
from edgellm_ros.diffusion.policy_config import MODEL_TARGET, AffineSpaceConfig, StateConfig, TipSpaceConfig

NEAR_ZERO = 1e-6  # what X-VLA adds to the length of a column


class AffineActionSpace:
    """The first values that the model computes, `(value + shift) * scale + offset`."""

    def __init__(self, config: AffineSpaceConfig) -> None:
        self.config = config
        self._offset, self._scale = np.array(config.offset, np.float32), np.array(config.scale, np.float32)
        self._shift = np.array(config.shift, np.float32)

    def denormalise(self, values: np.ndarray) -> np.ndarray:
        """Convert the model's values to physical actions.

        values: [..., model_dim]. Returns actions [..., A] in float32.
        """
        shifted = values[..., : self.config.dim].astype(np.float32) + self._shift
        return shifted * self._scale + self._offset

    def normalise(self, actions: np.ndarray) -> np.ndarray:
        """Convert physical actions [..., A] to the model's values, filled up with zeros."""
        values = np.zeros((*actions.shape[:-1], self.config.model_dim), np.float32)
        scale = np.where(self._scale == 0, np.float32(1), self._scale)  # a value that never changes
        scaled = (actions.astype(np.float32) - self._offset) / scale
        values[..., : self.config.dim] = scaled - self._shift
        return values

    def clip(self, actions: np.ndarray) -> np.ndarray:
        """Return physical actions in float32: they have no limits."""
        return actions.astype(np.float32)

    def integrate(self, actions: np.ndarray, speed: float) -> None:
        """Return None: the actions move no base, so that they have no path."""


class TipActionSpace(AffineActionSpace):
    """The first values that an X-VLA computes, or its targets of the arm's tip."""

    config: TipSpaceConfig

    def denormalise(self, values: np.ndarray) -> np.ndarray:
        """Convert the model's values to physical actions.

        values: [..., model_dim]. Returns actions [..., A] in float32.
        """
        if not self.config.is_target:
            return super().denormalise(values)
        point, columns, gripper = np.split(values[..., :MODEL_TARGET], [3, 9], axis=-1)
        ends = np.where(gripper > 0.5, 1.0, -1.0)
        return np.concatenate([point, axis_angles(columns), ends], axis=-1).astype(np.float32)


def axis_angles(columns: np.ndarray) -> np.ndarray:
    """Convert two columns of rotations [..., 6] to axes times angles.

    Returns [..., 3] float64 in rad. The columns need not be orthogonal. Angles are from 0 to pi.
    """
    first, second = columns[..., :3].astype(np.float64), columns[..., 3:].astype(np.float64)
    first = first / (np.linalg.norm(first, axis=-1, keepdims=True) + NEAR_ZERO)
    second = second - np.sum(first * second, axis=-1, keepdims=True) * first
    second = second / (np.linalg.norm(second, axis=-1, keepdims=True) + NEAR_ZERO)
    matrix = np.stack([first, second, np.cross(first, second)], axis=-1)
    x, y, z = (matrix[..., i, i] for i in range(3))
    # the products of a quaternion's values x, y, z, w with each other, times 4: every row is the quaternion
    # times one of its values, and the longest row is exact where that value is not near 0
    xy, xz, yz = (matrix[..., i, j] + matrix[..., j, i] for i, j in ((0, 1), (0, 2), (1, 2)))
    xw, yw, zw = (matrix[..., i, j] - matrix[..., j, i] for i, j in ((2, 1), (0, 2), (1, 0)))
    rows = np.stack(
        [
            np.stack([1 + x - y - z, xy, xz, xw], axis=-1),
            np.stack([xy, 1 - x + y - z, yz, yw], axis=-1),
            np.stack([xz, yz, 1 - x - y + z, zw], axis=-1),
            np.stack([xw, yw, zw, 1 + x + y + z], axis=-1),
        ],
        axis=-2,
    )
    longest = np.argmax(np.linalg.norm(rows, axis=-1), axis=-1)[..., None, None]
    row = np.take_along_axis(rows, longest, axis=-2)[..., 0, :]
    row = row * np.where(row[..., 3:] < 0, -1.0, 1.0)
    axis, length = row[..., :3], np.linalg.norm(row[..., :3], axis=-1, keepdims=True)
    angle = 2 * np.arctan2(length, row[..., 3:])
    return np.where(length > 0, axis / np.where(length > 0, length, 1.0) * angle, 0.0)


def model_state(state: np.ndarray | None, config: StateConfig) -> np.ndarray:
    """Check a state and convert it to the values that the model takes.

    Returns values [1, model_dim] float32. state [D]: in physical units. ValueError for None, another shape,
    or values that are not finite.
    """
    if state is None:
        raise ValueError(f"a policy needs the state [{config.dim}]: {', '.join(config.names)}")
    try:
        values = np.asarray(state, np.float32)
    except (TypeError, ValueError):
        raise ValueError(f"state must be numbers [{config.dim}], got {type(state).__name__}") from None
    if values.shape != (config.dim,):
        raise ValueError(
            f"state must have shape [{config.dim}] ({', '.join(config.names)}), got {list(values.shape)}"
        )
    if not np.isfinite(values).all():
        wrong = config.names[int(np.flatnonzero(~np.isfinite(values))[0])]
        raise ValueError(f"state has a value that is not finite: {wrong}")
    result = np.zeros((1, config.model_dim), np.float32)
    offset, scale = np.array(config.offset, np.float32), np.array(config.scale, np.float32)
    normalised = (values - offset) / scale - np.array(config.shift, np.float32)
    if isinstance(config, LimitedStateConfig):
        limits = np.array(config.limits, np.float32)
        normalised = np.clip(normalised, -limits, limits)
        normalised = _with_angles(normalised, values, config)
    result[0, : len(normalised)] = normalised
    return result


def _with_angles(normalised: np.ndarray, values: np.ndarray, config: LimitedStateConfig) -> np.ndarray:
    """Put sines and cosines of angles among `values` [D] in place of these."""
    parts, end = [], 0
    for first, count in config.angles:
        group = values[first : first + count]
        parts += [normalised[end:first], np.sin(group), np.cos(group)]
        end = first + count
    return np.concatenate([*parts, normalised[end:]])


class ActionReference:
    """What a plan adds to its actions: the values that these are relative to.

    state [D]: in physical units, or None. Values that are not relative to the state get 0.
    """

    def __init__(self, state: np.ndarray | None, config: AffineSpaceConfig) -> None:
        places = np.array(config.state_places)
        self._added, relative = np.zeros(config.dim, np.float32), np.flatnonzero(places >= 0)
        if state is not None:
            self._added[relative] = np.asarray(state, np.float32)[places[relative]]

    def absolute(self, actions: np.ndarray) -> np.ndarray:
        """Convert physical actions [..., A] of the model to absolute ones, in float32."""
        return actions + self._added

    def relative(self, actions: np.ndarray) -> np.ndarray:
        """Convert absolute actions [..., A] to those of the model, in float32."""
        return actions - self._added
