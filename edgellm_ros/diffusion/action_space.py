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

    def normalise(self, actions: np.ndarray) -> np.ndarray:
        """Convert physical actions [..., A] to the head's values in float32.

        Actions are clipped to [low, high] first.
        """
        return (self.clip(actions) - self._mean) / self._std

    def clip(self, actions: np.ndarray) -> np.ndarray:
        """Clip physical actions [..., A] to [low, high]; the result is float32."""
        return np.clip(actions.astype(np.float32), self._low, self._high)

    def integrate(self, actions: np.ndarray, speed: float) -> np.ndarray:
        """Integrate actions [n, T, 2] to a path from the origin.

        The robot starts with heading 0 and `speed` (m/s). Returns states [n, T+1, 4] float32: x, y (m),
        heading (rad, not wrapped), speed (m/s), in the frame of the start pose. A step is an exact circular
        arc. The robot does not drive backwards: when braking reaches a standstill within a step, the robot
        stays there until the end of the step.
        """
        acceleration, curvature = np.moveaxis(np.asarray(actions, np.float64), -1, 0)
        dt, count = self.config.dt, acceleration.shape[-1]
        speeds = np.empty((*acceleration.shape[:-1], count + 1))
        speeds[..., 0] = max(speed, 0.0)
        free = acceleration * dt
        for step in range(count):  # only this depends on the step before in more than a sum
            speeds[..., step + 1] = np.maximum(speeds[..., step] + free[..., step], 0.0)
        before, after = speeds[..., :-1], speeds[..., 1:]
        stops = before + free < 0
        moving_time = np.where(stops, before / np.where(stops, -acceleration, 1.0), dt)
        distance = 0.5 * (before + after) * moving_time
        turn = curvature * distance
        chord = distance * np.sinc(turn / (2 * np.pi))  # np.sinc(x) is sin(pi x) / (pi x)
        states = np.zeros((*speeds.shape, 4))
        np.cumsum(turn, axis=-1, out=states[..., 1:, 2])
        middle = states[..., :-1, 2] + turn / 2
        np.cumsum(chord * np.cos(middle), axis=-1, out=states[..., 1:, 0])
        np.cumsum(chord * np.sin(middle), axis=-1, out=states[..., 1:, 1])
        states[..., 3] = speeds
        return states.astype(np.float32)
