# SPDX-License-Identifier: Apache-2.0
"""The action space of GR00T.

Normalised values are limited, statistics may differ by step, and poses may be relative to the state's.

Source: LeRobot 0.6.1, policies/groot/processor_groot.py and utils.py.
"""

from __future__ import annotations

import numpy as np

from edgellm_ros.diffusion.affine_space import ActionReference, AffineActionSpace
from edgellm_ros.diffusion.groot_config import POSE, GrootSpaceConfig

POINT = 3  # values of a pose's point, and of a row of its rotation's matrix


class GrootActionSpace(AffineActionSpace):
    """The first `horizon` actions of the model, whose values are from -1 to 1."""

    config: GrootSpaceConfig

    def __init__(self, config: GrootSpaceConfig) -> None:
        super().__init__(config)
        if config.step_offset:
            self._offset = np.array(config.step_offset, np.float32)
            self._scale = np.array(config.step_scale, np.float32)
        else:
            self._offset = np.broadcast_to(self._offset, (config.horizon, config.dim))
            self._scale = np.broadcast_to(self._scale, (config.horizon, config.dim))

    def denormalise(self, values: np.ndarray) -> np.ndarray:
        """Convert the model's values to physical actions [...,horizon,A].

        values: [...,T,model_dim].
        """
        limited = np.clip(values[..., : self.config.horizon, : self.config.dim].astype(np.float32), -1, 1)
        rows = limited.shape[-2]
        return (limited + self._shift) * self._scale[:rows] + self._offset[:rows]

    def normalise(self, actions: np.ndarray) -> np.ndarray:
        """Convert physical actions [...,T,A] from the first step on, filled up with zeros."""
        values = np.zeros((*actions.shape[:-1], self.config.model_dim), np.float32)
        rows = actions.shape[-2]
        scale, offset = self._scale[:rows], self._offset[:rows]
        scale = np.where(scale == 0, np.float32(1), scale)  # a value that never changes
        values[..., : self.config.dim] = (actions.astype(np.float32) - offset) / scale - self._shift
        return values


class PoseReference(ActionReference):
    """A reference whose poses are composed.

    The pose of the state is the frame of the model's poses.
    """

    def __init__(self, state: np.ndarray, config: GrootSpaceConfig) -> None:
        super().__init__(state, config)
        self._frames = {
            first: (
                self._added[first : first + POINT].astype(np.float64),
                _rotations(self._added[first + POINT : first + POSE]),
            )
            for first in config.poses
        }
        for first in self._frames:
            self._added[first : first + POSE] = 0

    def absolute(self, actions: np.ndarray) -> np.ndarray:
        result = super().absolute(actions)
        for first, (point, rotation) in self._frames.items():
            points, turned = _split(result[..., first : first + POSE])
            points = points @ rotation.T + point
            result[..., first : first + POSE] = _joined(points, rotation @ turned)
        return result

    def relative(self, actions: np.ndarray) -> np.ndarray:
        result = super().relative(actions)
        for first, (point, rotation) in self._frames.items():
            points, turned = _split(result[..., first : first + POSE])
            points = (points - point) @ rotation
            result[..., first : first + POSE] = _joined(points, rotation.T @ turned)
        return result


def _split(poses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split poses [...,9] into points [...,3] and rotations [...,3,3], float64."""
    return poses[..., :POINT].astype(np.float64), _rotations(poses[..., POINT:])


def _joined(points: np.ndarray, rotations: np.ndarray) -> np.ndarray:
    """Join points [...,3] and rotations [...,3,3] to poses [...,9]."""
    return np.concatenate([points, rotations[..., 0, :], rotations[..., 1, :]], axis=-1)


def _rotations(rows: np.ndarray) -> np.ndarray:
    """Make rotations [...,3,3] float64 of two rows [...,6].

    The rows need not be orthogonal.
    """
    first, second = rows[..., :POINT].astype(np.float64), rows[..., POINT:].astype(np.float64)
    first = first / np.linalg.norm(first, axis=-1, keepdims=True)
    second = second - np.sum(first * second, axis=-1, keepdims=True) * first
    second = second / np.linalg.norm(second, axis=-1, keepdims=True)
    return np.stack([first, second, np.cross(first, second)], axis=-2)
