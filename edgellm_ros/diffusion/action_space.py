# SPDX-License-Identifier: Apache-2.0
"""What actions mean: from the head's normalised numbers to accelerations and curvatures, and on to a path."""

from __future__ import annotations

import numpy as np

from edgellm_ros.diffusion.config import ActionSpaceConfig


class UnicycleActionSpace:
    """Actions (acceleration in m/s^2, curvature in 1/m), one per `dt`; each is held constant for its step."""

    def __init__(self, config: ActionSpaceConfig) -> None:
        self.config = config
        limits = (config.mean, config.std, config.low, config.high)
        self._mean, self._std, self._low, self._high = (np.array(values, np.float32) for values in limits)

    def denormalise(self, values: np.ndarray) -> np.ndarray:
        """[..., A] as the head makes them -> physical actions, float32, clipped to [low, high]."""
        return np.clip(values.astype(np.float32) * self._std + self._mean, self._low, self._high)

    def integrate(self, actions: np.ndarray, speed: float) -> np.ndarray:
        """Drive actions [n, T, 2] from the origin with heading 0 and `speed` (m/s) at the start.

        Returns states [n, T+1, 4] float32: x, y (m), heading (rad, not wrapped), speed (m/s), in the frame of
        the start pose. A step is an exact circular arc. The robot does not drive backwards: braking ends at a
        standstill, within the step in which it is reached.
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
