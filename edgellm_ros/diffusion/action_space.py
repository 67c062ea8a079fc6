# SPDX-License-Identifier: Apache-2.0
"""The unicycle action space: from the head's normalised values to a path."""

from __future__ import annotations

import numpy as np

from edgellm_ros.diffusion.config import ActionSpaceConfig


class UnicycleActionSpace:
    """Actions of acceleration (m/s^2) and curvature (1/m), constant for `dt` each."""

    def __init__(self, config: ActionSpaceConfig) -> None:
        self.config = config
        limits = (config.mean, config.std, config.low, config.high)
        self._mean, self._std, self._low, self._high = (np.array(values, np.float32) for values in limits)

    def denormalise(self, values: np.ndarray) -> np.ndarray:
        """Convert the head's values [..., A] to physical actions.

        The result is float32, clipped to [low, high].
        """
        return np.clip(values.astype(np.float32) * self._std + self._mean, self._low, self._high)

    def integrate(self, actions: np.ndarray, speed: float) -> np.ndarray:
        """Integrate actions [n, T, 2] to a path from the origin.

        The robot starts with heading 0 and `speed` (m/s). Returns states [n, T+1, 4] float32: x, y (m),
        heading (rad, not wrapped), speed (m/s), in the frame of the start pose. A step is an exact circular
        arc. The robot does not drive backwards: when braking reaches a standstill within a step, the robot
        stays there until the end of the step.
        """
        acceleration, curvature = np.moveaxis(np.asarray(actions, np.float64), -1, 0)
        dt = self.config.dt
        states = np.zeros((*acceleration.shape[:-1], acceleration.shape[-1] + 1, 4))
        states[..., 0, 3] = max(speed, 0.0)
        for step in range(acceleration.shape[-1]):
            x, y, heading, before = np.moveaxis(states[..., step, :], -1, 0)
            after = before + acceleration[..., step] * dt
            stops = after < 0
            moving_time = np.where(stops, before / np.where(stops, -acceleration[..., step], 1.0), dt)
            after = np.maximum(after, 0.0)
            distance = 0.5 * (before + after) * moving_time
            turn = curvature[..., step] * distance
            chord = distance * np.sinc(turn / (2 * np.pi))  # np.sinc(x) is sin(pi x) / (pi x)
            states[..., step + 1, 0] = x + chord * np.cos(heading + turn / 2)
            states[..., step + 1, 1] = y + chord * np.sin(heading + turn / 2)
            states[..., step + 1, 2] = heading + turn
            states[..., step + 1, 3] = after
        return states.astype(np.float32)
