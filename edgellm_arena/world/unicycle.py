# SPDX-License-Identifier: Apache-2.0
"""The robot's motion: a unicycle driven by acceleration and curvature at 10 Hz.

One action is held for DT. Speed changes linearly within the step and the path is an exact circular arc, so a
path does not depend on the integration step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DT = 0.1  # s
HORIZON = 40  # actions in one plan
HISTORY = 8  # past positions that the model gets, with the current one
ROBOT_RADIUS = 0.15  # m
V_MAX = 0.8  # m/s
ACCEL_MIN, ACCEL_MAX = -1.5, 1.0  # m/s^2
CURVATURE_MAX = 2.5  # 1/m, to either side


@dataclass(frozen=True)
class State:
    """Pose and speed of the robot in the world frame."""

    x: float = 0.0  # m
    y: float = 0.0  # m
    heading: float = 0.0  # rad, counter-clockwise from the x axis
    speed: float = 0.0  # m/s

    def array(self) -> NDArray[np.float64]:
        """Return the state as [4]: x, y, heading, speed."""
        return np.array([self.x, self.y, self.heading, self.speed])


def wrap(angle):
    """Wrap an angle or array of angles in radians to (-pi, pi]."""
    return -((-angle + np.pi) % (2 * np.pi) - np.pi)


def clip_action(accel, curvature):
    """Clip an action (floats or arrays) to the robot's limits."""
    return np.clip(accel, ACCEL_MIN, ACCEL_MAX), np.clip(curvature, -CURVATURE_MAX, CURVATURE_MAX)


def advance(states: NDArray, accel, curvature, dt: float = DT) -> NDArray[np.float64]:
    """Compute states [..., 4] after one action each.

    accel, curvature: [...] in m/s^2 and 1/m, clipped to the robot's limits. A negative dt runs time
    backwards: the result is the state from which the action leads to the given state.
    """
    accel, curvature = clip_action(accel, curvature)
    x, y, heading, speed = np.moveaxis(np.asarray(states, np.float64), -1, 0)
    after = np.clip(speed + accel * dt, 0.0, V_MAX)
    way = 0.5 * (speed + after) * dt
    turn = curvature * way
    chord = way * np.sinc(turn / (2 * np.pi))
    middle = heading + 0.5 * turn
    return np.stack([x + chord * np.cos(middle), y + chord * np.sin(middle), heading + turn, after], -1)


def step(state: State, accel: float, curvature: float) -> State:
    """Compute the state after one action held for DT."""
    x, y, heading, speed = advance(state.array(), accel, curvature)
    return State(float(x), float(y), float(wrap(heading)), float(speed))


def rollout(state: State, actions: NDArray) -> NDArray[np.float64]:
    """Compute states [T+1, 4] along actions [T, 2], start included.

    A state is (x, y, heading, speed), an action (accel, curvature).
    """
    states = [state.array()]
    for accel, curvature in np.asarray(actions, np.float64):
        states.append(advance(states[-1], accel, curvature))
    return np.stack(states)


def to_base(state: State, points: NDArray) -> NDArray[np.float64]:
    """Convert world points [..., 2] to the base frame: x forward, y left (REP 103)."""
    cos, sin = np.cos(state.heading), np.sin(state.heading)
    dx, dy = (
        np.asarray(points, np.float64)[..., 0] - state.x,
        np.asarray(points, np.float64)[..., 1] - state.y,
    )
    return np.stack([cos * dx + sin * dy, -sin * dx + cos * dy], -1)


def to_world(state: State, points: NDArray) -> NDArray[np.float64]:
    """Convert points [..., 2] of the base frame to the world frame."""
    cos, sin = np.cos(state.heading), np.sin(state.heading)
    px, py = np.asarray(points, np.float64)[..., 0], np.asarray(points, np.float64)[..., 1]
    return np.stack([state.x + cos * px - sin * py, state.y + sin * px + cos * py], -1)
