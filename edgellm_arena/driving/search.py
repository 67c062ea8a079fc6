# SPDX-License-Identifier: Apache-2.0
"""How the expert finds a solid out of sight: the robot turns on a small circle.

The robot cannot turn on the spot, so it drives the tightest circle that touches nothing. Side and curvature
depend only on the recent motion and the scene: a robot that turns already goes on to the same side, so that
replanning on the way continues the search.
"""

from __future__ import annotations

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from edgellm_arena.driving.expert import BRISK, Manner, acceleration, brake, turn_limit
from edgellm_arena.world.scene import ROOM_CENTRE, Scene
from edgellm_arena.world.unicycle import CURVATURE_MAX, HORIZON, ROBOT_RADIUS, State, advance, rollout, step
from edgellm_arena.world.visibility import Sight, sights

LEFT, RIGHT = 1, -1
# 1/m, for a turn to the left, the preferred ones first; a turn to the right has the opposite signs.
CURVATURES = CURVATURE_MAX * np.array([1.0, 0.8, 0.6, 0.4, 0.2, 0.0, -0.25, -0.5, -0.75, -1.0])
TURNING = 1.2  # 1/m: a robot with at least this mean curvature is turning
MARGIN = 0.08  # m kept free beside the robot
_MOVED = 0.02  # m: shorter histories tell nothing about the curvature
SEARCH_PLANS, SEARCH_STEPS = 30, 5  # of `find`: the plans of a search, and the actions driven of each
_SHORTEST = 12  # steps until a collision, below which the robot stays where it is


def turning_side(history: NDArray[np.float64]) -> int | None:
    """Return the side the robot turns to, LEFT or RIGHT; None if it does not turn.

    history: past positions [8, 2] in m in the current base frame, oldest first.
    """
    moves = np.diff(history, axis=0)
    lengths = np.hypot(*moves.T)
    moves = moves[lengths > 1e-3]
    if len(moves) < 2 or lengths.sum() < _MOVED:
        return None
    headings = np.unwrap(np.arctan2(moves[:, 1], moves[:, 0]))
    way = np.hypot(*moves.T)
    between = way.sum() - (way[0] + way[-1]) / 2  # from the middle of the first move to that of the last
    curvature = (headings[-1] - headings[0]) / between
    return None if abs(curvature) < TURNING else LEFT if curvature > 0 else RIGHT


def search_side(history: NDArray[np.float64], bearing: float | None, rng: Generator) -> int:
    """Choose the side to which the robot turns to find a solid.

    bearing: of the solid, positive to the left, which decides for a robot that does not turn
    yet; None for a solid that is not in the scene: then the choice is random.
    """
    side = turning_side(history)
    if side is not None:
        return side
    if bearing is None:
        return LEFT if rng.random() < 0.5 else RIGHT
    return LEFT if bearing > 0 else RIGHT


def search(scene: Scene, state: State, side: int, manner: Manner = BRISK) -> NDArray[np.float64]:
    """Plan actions [40, 2] (m/s^2, 1/m) that turn to a side on a small circle.

    The circle is the tightest one that is free. The robot brakes where every circle soon touches a solid or a
    wall.
    """
    curvatures = side * CURVATURES
    states = np.repeat(state.array()[None], len(curvatures), 0)
    limit = turn_limit(curvatures, manner)
    actions = np.zeros((len(curvatures), HORIZON, 2))
    actions[:, :, 1] = curvatures[:, None]
    room = np.empty((len(curvatures), HORIZON))
    for index in range(HORIZON):
        actions[:, index, 0] = acceleration(limit, states[:, 3])
        states = advance(states, *actions[:, index].T)
        room[:, index] = _room(scene, states)
    for free, chosen in zip(room.min(1) >= ROBOT_RADIUS + MARGIN, actions, strict=True):
        if free:
            return chosen
    touches = room < ROBOT_RADIUS
    until = np.where(touches.any(1), touches.argmax(1), HORIZON)
    best = int(until.argmax())
    return actions[best] if until[best] >= _SHORTEST else brake(state.speed)


def find(scene: Scene, start: State, target: int, side: int) -> State | None:
    """Turn to a side until a solid is in view; return the state there.

    The result is None if the solid stays out of sight. The search is planned again and again on the way, as a
    robot does it.
    """
    state = start
    for _ in range(SEARCH_PLANS):
        for accel, curvature in search(scene, state, side)[:SEARCH_STEPS]:
            state = step(state, accel, curvature)
        if scene.clearance(state.x, state.y) < ROBOT_RADIUS:
            return None
        if sights(scene, state)[target] is Sight.SEEN:
            return state
    return None


def collides(scene: Scene, state: State, actions: NDArray[np.float64]) -> bool:
    """Return True if the robot touches a solid on its way along actions [T, 2]."""
    return min(scene.clearance(x, y) for x, y in rollout(state, actions)[:, :2]) < ROBOT_RADIUS


def _room(scene: Scene, states: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute the distance in m [N] from states [N, 4] to the nearest solid or wall."""
    room = scene.look.room
    walls = np.minimum(
        room[0] - np.abs(states[:, 0] - ROOM_CENTRE[0]), room[1] - np.abs(states[:, 1] - ROOM_CENTRE[1])
    )
    solids = np.array([[solid.x, solid.y, solid.radius] for solid in scene.solids]).reshape(-1, 3)
    away = np.hypot(states[:, None, 0] - solids[:, 0], states[:, None, 1] - solids[:, 1]) - solids[:, 2]
    return np.minimum(walls, away.min(1, initial=np.inf))
