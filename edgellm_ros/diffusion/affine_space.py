# SPDX-License-Identifier: Apache-2.0
"""The action space of a policy.

The space has names, units and statistics of each value, and no path.
"""

from __future__ import annotations

import numpy as np

from edgellm_ros.diffusion.policy_config import AffineSpaceConfig, LimitedStateConfig, StateConfig


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
