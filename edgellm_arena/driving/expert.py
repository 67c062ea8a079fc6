# SPDX-License-Identifier: Apache-2.0
"""The analytic driver, whose actions the model learns.

The expert knows the whole scene. It steers to the target. While the disc of a solid, enlarged by the robot's
radius and a clearance, blocks the straight line, the expert steers along the tangent of that disc on one
side. Curvature follows from the heading error alone, and speed from the curvature and the remaining distance.
The action therefore depends only on the state, and replanning on the way continues the old plan. Each choice
of sides is simulated to the end. The cheapest route wins; between routes of about equal cost the choice is
random. All computations are vectorised over situations and choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from edgellm_arena.world.scene import Scene
from edgellm_arena.world.unicycle import (
    ACCEL_MAX,
    CURVATURE_MAX,
    DT,
    HORIZON,
    ROBOT_RADIUS,
    V_MAX,
    State,
    advance,
    wrap,
)

# m from the target's surface to the robot's centre at rest; too far can be corrected later, too near cannot
STOP_DISTANCE = 0.30
STEPS = 130  # actions of the longest simulated route at V_MAX
# Side of the nearest blocking solid, and of the others; 1 = left.
SIDES = np.array([[1, 1], [-1, -1], [1, -1], [-1, 1]])
EVEN_AT_REST = 0.4  # s: a robot at rest chooses about equally among routes with smaller differences in cost
EVEN_MOVING = 0.2  # s: the same for a moving robot, which should keep its route

_RESTING = 0.05  # m/s
_STEER = 2.6  # 1/m per rad of heading error
_SETTLE = 0.35  # s: time constant with which the speed follows its set point
_BESIDE = 1.3  # enlarged radii from a solid's centre within which its side is fixed
_BRAKE = 1.2  # m/s^2, for a stop on command


@dataclass(frozen=True)
class Manner:
    """A way of driving."""

    top_speed: float = V_MAX  # m/s
    clearance: float = 0.12  # m kept free beside the robot
    careful: bool = False  # whether the robot says that it drives carefully


BRISK = Manner()
CAREFUL = Manner(top_speed=0.4, clearance=0.25, careful=True)


@dataclass(frozen=True)
class Route:
    """One route to the target."""

    states: NDArray[np.float64]  # [T+1, 4]
    actions: NDArray[np.float64]  # [T, 2]
    cost: float  # s, about the time that the route takes
    collides: bool
    arrives: bool


@dataclass(frozen=True)
class _Problem:
    """N situations as arrays; missing solids are replaced by solids far away."""

    xy: NDArray[np.float64]  # [N, M, 2]
    radius: NDArray[np.float64]  # [N, M]
    target: NDArray[np.int64]  # [N]
    start: NDArray[np.float64]  # [N, 4]
    manner: Manner

    @property
    def grown(self) -> NDArray[np.float64]:
        """Return the radii [N, M] of the discs that the robot's centre must not enter."""
        return self.radius + ROBOT_RADIUS + self.manner.clearance


def plan(
    scene: Scene, state: State, target: int | None, rng: Generator, manner: Manner = BRISK
) -> NDArray[np.float64]:
    """Plan the expert's next HORIZON actions [40, 2] (m/s^2, 1/m) to solid `target`.

    `target` None means to stop. The expert brakes if every route collides.
    """
    return plan_batch([scene], [state], [target], rng, manner)[0]


def plan_batch(
    scenes: Sequence[Scene],
    states: Sequence[State],
    targets: Sequence[int | None],
    rng: Generator,
    manner: Manner = BRISK,
) -> NDArray[np.float64]:
    """Run `plan` for N situations at once and return actions [N, 40, 2]."""
    actions = np.stack([brake(s.speed) for s in states])
    going = [i for i, target in enumerate(targets) if target is not None]
    if going:
        choices = routes_batch(
            [scenes[i] for i in going], [states[i] for i in going], [targets[i] for i in going], manner
        )
        for i, routes in zip(going, choices, strict=True):
            route = choose(routes, rng)
            if not route.collides:
                actions[i] = route.actions[:HORIZON]
    return actions


def turn_limit(curvature: NDArray[np.float64], manner: Manner) -> NDArray[np.float64]:
    """Return the highest speed in m/s with which a manner drives a curvature in 1/m."""
    return manner.top_speed / (1 + 0.55 * np.abs(curvature))


def acceleration(allowed: NDArray[np.float64], speed: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the acceleration in m/s^2 that takes the speed towards the allowed one."""
    return np.clip((allowed - speed) / _SETTLE, -1.4, ACCEL_MAX * 0.9)


def brake(speed: float, steps: int = HORIZON) -> NDArray[np.float64]:
    """Return actions [steps, 2] that stop the robot, without steering."""
    actions = np.zeros((steps, 2))
    for action in actions:
        action[0] = max(-_BRAKE, -speed / DT if speed < 0.12 else -speed / 0.22)
        speed = max(speed + action[0] * DT, 0.0)
    return actions


def routes(scene: Scene, state: State, target: int, manner: Manner = BRISK) -> list[Route]:
    """Return all distinct routes to the target, unordered."""
    return routes_batch([scene], [state], [target], manner)[0]


def choose(choices: Sequence[Route], rng: Generator) -> Route:
    """Choose a cheap route at random.

    A cost difference well below EVEN_AT_REST or EVEN_MOVING has little influence; a larger one decides. A
    colliding route is chosen only if all routes collide.
    """
    costs = np.array([r.cost for r in choices])
    even = EVEN_AT_REST if choices[0].states[0, 3] < _RESTING else EVEN_MOVING
    weights = np.exp(-(((costs - costs.min()) / even) ** 2))
    return choices[int(rng.choice(len(choices), p=weights / weights.sum()))]


def blocking(scene: Scene, state: State, target: int, manner: Manner = BRISK) -> list[int]:
    """List the solids that block the straight line to the target, nearest first."""
    problem = _problem([scene], [state], [target], manner)
    bearing, distance = _seen_from(problem.start[:, None], problem)
    ahead = _blocked(bearing[:, :, target], bearing, distance, problem)
    found = [i for i in np.flatnonzero(ahead[0, 0]) if i < len(scene.solids)]
    return sorted((int(i) for i in found), key=lambda i: distance[0, 0, i])


def routes_batch(
    scenes: Sequence[Scene], states: Sequence[State], targets: Sequence[int], manner: Manner = BRISK
) -> list[list[Route]]:
    """Run `routes` for N situations at once; choices with the same route are merged."""
    problem = _problem(scenes, states, targets, manner)
    path, actions, cost, collides, arrives = _drive(problem)
    result = []
    for n in range(len(scenes)):
        kept: list[Route] = []
        for k in range(len(SIDES)):
            if any(np.abs(path[n, k, :, :2] - r.states[:, :2]).max() < 0.05 for r in kept):
                continue
            kept.append(
                Route(path[n, k], actions[n, k], float(cost[n, k]), bool(collides[n, k]), bool(arrives[n, k]))
            )
        result.append(kept)
    return result


def _problem(
    scenes: Sequence[Scene], states: Sequence[State], targets: Sequence[int], manner: Manner
) -> _Problem:
    most = max(len(s.solids) for s in scenes)
    xy = np.full((len(scenes), most, 2), 1e3)
    radius = np.full((len(scenes), most), 0.1)
    for n, scene in enumerate(scenes):
        for m, solid in enumerate(scene.solids):
            xy[n, m] = solid.x, solid.y
            radius[n, m] = solid.radius
        if not 0 <= targets[n] < len(scene.solids):
            raise ValueError(
                f"target {targets[n]} is not the index of a solid, expected 0 to {len(scene.solids) - 1}"
            )
    start = np.stack([s.array() for s in states])
    return _Problem(xy, radius, np.asarray(targets, np.int64), start, manner)


def _seen_from(states: NDArray, problem: _Problem) -> tuple[NDArray, NDArray]:
    """Compute bearings and distances [N, K, M] of all solids from states [N, K, 4]."""
    gap = problem.xy[:, None] - states[:, :, None, :2]
    return np.arctan2(gap[..., 1], gap[..., 0]), np.hypot(gap[..., 0], gap[..., 1])


def _blocked(heading: NDArray, bearing: NDArray, distance: NDArray, problem: _Problem) -> NDArray[np.bool_]:
    """Find the solids [N, K, M] that block the straight line with this heading [N, K].

    Only solids before the target count. Bearings and distances are those of `_seen_from`.
    """
    rows = np.arange(len(problem.target))
    off = bearing - heading[..., None]
    forward, aside = distance * np.cos(off), np.abs(distance * np.sin(off))
    to_target = (
        distance[rows, :, problem.target] - problem.radius[rows, problem.target][:, None] - STOP_DISTANCE
    )
    across = (aside < problem.grown[:, None]) & (forward > 0) & (forward < to_target[..., None])
    across[rows, :, problem.target] = False
    return across


def _drive(problem: _Problem) -> tuple[NDArray, NDArray, NDArray, NDArray, NDArray]:
    """Simulate every choice of sides.

    Returns states [N, K, T+1, 4], actions [N, K, T, 2], and cost, collides and arrives [N, K].
    """
    count, choices = len(problem.target), len(SIDES)
    top_speed, clearance = problem.manner.top_speed, problem.manner.clearance
    steps = round(STEPS * V_MAX / top_speed)
    rows, columns = np.arange(count), np.arange(choices)
    states = np.repeat(problem.start[:, None], choices, 1)
    bearing, far = _seen_from(states, problem)
    path = np.empty((count, choices, steps + 1, 4))
    actions = np.zeros((count, choices, steps, 2))
    path[:, :, 0] = states
    target_radius = problem.radius[rows, problem.target][:, None]
    grown = problem.grown[:, None]
    side = _sides(problem)
    time = np.full((count, choices), steps * DT)
    squeeze, turning, unseen = (
        np.zeros((count, choices)),
        np.zeros((count, choices)),
        np.zeros((count, choices)),
    )
    collides = np.zeros((count, choices), bool)
    done = np.zeros((count, choices), bool)
    for index in range(steps):
        goal = bearing[rows, :, problem.target]
        left = far[rows, :, problem.target] - target_radius - STOP_DISTANCE
        wish = goal
        for _ in range(2):  # the second pass finds solids that block the tangent of the first
            across = _blocked(wish, bearing, far, problem)
            any_across = across.any(2)
            if not any_across.any():
                break
            nearest = np.where(across, far, np.inf).argmin(2)
            half = np.arcsin(np.minimum(grown / np.maximum(far, 1e-6), 0.96))
            tangent = bearing + side * half
            wish = np.where(any_across, tangent[rows[:, None], columns, nearest], wish)
        error = wrap(wish - states[..., 2])
        curvature = np.clip(_STEER * error, -CURVATURE_MAX, CURVATURE_MAX) * np.clip(left / 0.12, 0, 1)
        speed = states[..., 3]
        limit = turn_limit(curvature, problem.manner)
        allowed = np.minimum(limit, np.minimum(1.1 * left, 0.9 * np.sqrt(np.maximum(left, 0))))
        allowed = np.maximum(allowed, 0.0)
        accel = acceleration(allowed, speed)
        resting = (allowed < 0.05) & (speed < 0.06)
        accel = np.where(resting, -speed / DT, accel)
        curvature = np.where(resting, 0.0, curvature)
        actions[:, :, index, 0], actions[:, :, index, 1] = accel, curvature
        states = advance(states, accel, curvature)
        path[:, :, index + 1] = states
        bearing, far = _seen_from(states, problem)
        clear = (far - problem.radius[:, None]).min(2)
        moving = ~done
        collides |= moving & (clear < ROBOT_RADIUS)
        squeeze += moving * np.maximum(ROBOT_RADIUS + clearance - clear, 0) * DT
        turning += moving * np.abs(curvature) * states[..., 3] * DT
        off = np.abs(wrap(goal - states[..., 2]))
        unseen += moving * np.maximum(off - np.deg2rad(38), 0) * DT
        arrived = moving & (left < 0.06)
        time = np.where(arrived, (index + 1) * DT, time)
        done |= left < 0.06
        if done.all() and index >= HORIZON + 10 and (states[..., 3] == 0).all():
            path[:, :, index + 2 :] = states[:, :, None]
            break
    cost = time + 12.0 * squeeze + 0.6 * turning + 6.0 * unseen + 60.0 * collides
    return path, actions, cost, collides, done


def _sides(problem: _Problem) -> NDArray[np.float64]:
    """Compute the side on which each choice passes each solid [N, K, M].

    1 is left of the solid, -1 right. The first blocking solid gets the choice's first side, the other
    blocking solids get the second. A solid that does not block, or that the robot is already beside, is
    passed on the side where the straight line passes it.
    """
    bearing, far = _seen_from(problem.start[:, None], problem)
    goal = bearing[np.arange(len(bearing)), :, problem.target]
    across = _blocked(goal, bearing, far, problem)[:, 0]
    bearing, far = bearing[:, 0], far[:, 0]
    plain = np.where(np.sin(bearing - goal) > 0, -1, 1)
    across = across & (far > _BESIDE * problem.grown)
    first = np.where(across, far, np.inf).argmin(1)
    is_first = across & (np.arange(far.shape[1])[None] == first[:, None])
    chosen = np.where(is_first[:, None], SIDES[None, :, 0, None], SIDES[None, :, 1, None])
    return np.where(across[:, None], chosen, plain[:, None]).astype(np.float64)
