# SPDX-License-Identifier: Apache-2.0
"""Misses, from which a demonstration of another attempt begins.

The gripper goes along legs that grasp beside the block, push it or lose it, and stops at a random moment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm_tabletop.units import GRIPPER
from edgellm_tabletop.world import ACTION_SCALE, GOALS, Tabletop

HOVER, CARRY, GRASP = 0.09, 0.095, 0.035  # m, heights of the gripper in the scripted controller's phases
OPEN, CLOSED = 1.0, 0.0
CAREFUL = 0.4  # of the speed: next to the block
REACHED, STUCK, STILL = 0.005, 0.0015, 2.0  # m from a leg's end; m and percent of the opening in a step
MOST_STEPS = 25  # of a leg
STOP_STEPS = 8  # at most, in the leg in which the gripper stops
BESIDE = (0.0, 0.06)  # m, of a wrong grasp from the block
NEAR = 0.02  # m: from here on a wrong grasp may still become a right one, until it closes
FROM_MARK = (0.045, 0.09)  # m, of a lost block
REACH = ((0.14, -0.13), (0.31, 0.13))  # m: places of the block from which another attempt is made
RESTING_HEIGHT, SETTLING_STEPS = 0.021, 10  # m, of the block's centre: 0.020 where it lies flat


@dataclass(frozen=True)
class Leg:
    """Where the gripper goes, and how far it is open."""

    point: NDArray[np.float64]  # [3] m
    opening: float
    speed: float = 1.0  # of the largest


Legs = tuple[list[Leg], int]  # and the first one in which the gripper may stop


def at(place: NDArray, height: float) -> NDArray[np.float64]:
    """Return the point [3] above a place [2] of the table."""
    return np.array([*place, height])


def around(rng: np.random.Generator, place: NDArray, least: float, most: float) -> NDArray[np.float64]:
    """Draw a place [2], `least` to `most` m from another one."""
    angle = rng.uniform(0, 2 * np.pi)
    return place + rng.uniform(least, most) * np.array([np.cos(angle), np.sin(angle)])


def grasp_beside(world: Tabletop, rng: np.random.Generator) -> Legs:
    """Grasp beside the block or with a jaw on it, and carry nothing to the mark."""
    block, mark = world.block[:2], np.array(GOALS[world.goal])
    place = around(rng, block, *BESIDE)
    first = 1 if np.hypot(*(place - block)) > NEAR else 2
    lift, low = rng.uniform(GRASP, CARRY), rng.uniform(GRASP, HOVER)
    return [
        Leg(at(place, HOVER), OPEN),
        Leg(at(place, GRASP), OPEN, CAREFUL),
        Leg(at(place, GRASP), CLOSED),
        Leg(at(place, lift), CLOSED, CAREFUL),
        Leg(at(mark, CARRY), CLOSED),
        Leg(at(mark, low), CLOSED, CAREFUL),
    ], first


def push(world: Tabletop, rng: np.random.Generator) -> Legs:
    """Push the block with the open or closed gripper, and close it there."""
    block = world.block[:2]
    beside = around(rng, block, 0.04, 0.07)
    beyond = block + rng.uniform(-0.5, 0.5) * (block - beside)
    opening = rng.choice([OPEN, CLOSED])
    return [
        Leg(at(beside, HOVER), opening),
        Leg(at(beside, GRASP), opening, CAREFUL),
        Leg(at(beyond, GRASP), opening, CAREFUL),
        Leg(at(beyond, GRASP), CLOSED),
        Leg(at(beyond, rng.uniform(GRASP, CARRY)), CLOSED, CAREFUL),
    ], 2


def lose(world: Tabletop, rng: np.random.Generator) -> Legs:
    """Carry the block, and let it fall near the mark, but outside of it."""
    block, place = world.block[:2], around(rng, np.array(GOALS[world.goal]), *FROM_MARK)
    height, opening = rng.uniform(GRASP, CARRY), rng.choice([OPEN, CLOSED])
    return [
        Leg(at(block, HOVER), OPEN),
        Leg(at(block, GRASP), OPEN, CAREFUL),
        Leg(at(block, GRASP), CLOSED),
        Leg(at(block, CARRY), CLOSED, CAREFUL),
        Leg(at(place, CARRY), CLOSED),
        Leg(at(place, height), CLOSED, CAREFUL),
        Leg(at(place, height), OPEN),
        Leg(at(place, HOVER), opening, CAREFUL),
    ], 6


def stand_at_mark(world: Tabletop, rng: np.random.Generator) -> Legs:
    """Go to the mark without the block."""
    mark, opening = np.array(GOALS[world.goal]), rng.choice([OPEN, CLOSED], p=[0.3, 0.7])
    low = at(mark, rng.uniform(GRASP, HOVER))
    return [Leg(at(mark, CARRY), opening), Leg(low, opening, CAREFUL), Leg(low, OPEN)], 0


MISSES: dict[str, Callable[[Tabletop, np.random.Generator], Legs]] = {
    "beside": grasp_beside,
    "pushed": push,
    "lost": lose,
    "at_mark": stand_at_mark,
}


def follow(world: Tabletop, leg: Leg, most: int = MOST_STEPS) -> None:
    """Follow a leg to its end, or for `most` steps.

    What does not move any more is at its end.
    """
    for _ in range(most):
        before, opening = world.gripper, world.state[GRIPPER]
        way = leg.point - before
        world.act(np.array([*np.clip(way / ACTION_SCALE, -leg.speed, leg.speed), leg.opening]))
        still = abs(world.state[GRIPPER] - opening) < STILL
        moved = np.linalg.norm(world.gripper - before)
        if still and (moved < STUCK or np.linalg.norm(leg.point - world.gripper) < REACHED):
            return


def settle(world: Tabletop, opening: float) -> bool:
    """Wait until the block rests; return whether it lies flat on the table."""
    for _ in range(SETTLING_STEPS):
        if world.block[2] <= RESTING_HEIGHT:
            break
        world.act(np.array([0, 0, 0, opening]))
    return bool(world.block[2] <= RESTING_HEIGHT)


def miss(world: Tabletop, rng: np.random.Generator, kind: str) -> bool:
    """Bring the arm into a miss, and begin the episode again from there.

    kind: one of MISSES. Returns False if there is no miss to mend: the gripper would hold the block, or the
    block lies on the mark or out of reach.
    """
    legs, first = MISSES[kind](world, rng)
    last = int(rng.integers(first, len(legs)))
    for leg in legs[:last]:
        follow(world, leg)
    follow(world, legs[last], int(rng.integers(1, STOP_STEPS + 1)))
    lies = settle(world, legs[last].opening)
    place = world.block[:2]
    from_mark = np.hypot(*(place - GOALS[world.goal]))
    inside = np.all(place > REACH[0]) and np.all(place < REACH[1])
    if not (lies and inside and from_mark >= FROM_MARK[0]) or world.grasps():
        return False
    world.restart()
    return True
