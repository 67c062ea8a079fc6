# SPDX-License-Identifier: Apache-2.0
"""Chunks that continue the plan of a driver who is mistaken about the scene.

A robot continues actions that were planned for an older frame, so they may lead to something that has come
into view since. The expert's own actions never do: they tell where the solids are, and a model that learned
to continue those alone would trust them more than the picture. Here the first actions are those of a driver
who misses some solids and misplaces the others, drives where the expert stops, or just keeps the speed; and
the expert, who knows the scene, goes on from where they lead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from edgellm_arena.driving import expert
from edgellm_arena.driving.search import collides, search, turning_side
from edgellm_arena.episodes.situation import Situation, with_margin
from edgellm_arena.world.scene import Scene
from edgellm_arena.world.unicycle import HISTORY, HORIZON, State, rollout, to_base, to_world, wrap

LONGEST = 16  # actions of the mistaken driver
MISSED = 0.4  # share of the solids that it does not see, the target apart
MISPLACED = 0.1  # m: standard deviation of the others' places, in x and y
ANY_SIDE = 0.4  # share of its plans with a random choice of sides instead of a cheap one
INATTENTIVE = 0.25  # share of its plans that keep the speed, also 0, and a curvature
FAR = 1e3  # m: where a solid changes nothing
_BATCH = 48


@dataclass(frozen=True)
class Continuation:
    """A chunk whose first actions are given."""

    actions: NDArray[np.float64]  # [40, 2]
    given: int  # from 1 to LONGEST


def mistaken_scene(rng: Generator, scene: Scene, target: int) -> Scene:
    """Return the scene as a mistaken driver believes it is; solids keep their indices."""
    solids = []
    for index, solid in enumerate(scene.solids):
        missed = index != target and rng.random() < MISSED
        away = np.full(2, FAR) if missed else rng.normal(0, MISPLACED, 2)
        solids.append(replace(solid, x=solid.x + float(away[0]), y=solid.y + float(away[1])))
    return replace(scene, solids=tuple(solids))


def continuations(
    rng: Generator, situations: Sequence[Situation], manner: expert.Manner = expert.BRISK
) -> list[Continuation | None]:
    """Make a continuation for each situation.

    Where every way on collides, the expert brakes. Where it stops on command or searches, the mistaken driver
    drives to any solid. None for situations without actions, and where
    the chunk collides.
    """
    made: list[Continuation | None] = [None for _ in situations]
    driven = [(i, s) for i, s in enumerate(situations) if s.has_actions]
    if not driven:
        return made
    cases, roomy = [s for _, s in driven], with_margin(manner)
    goals = [int(rng.integers(len(s.scene.solids))) if s.target is None else s.target for s in cases]
    believed = [mistaken_scene(rng, s.scene, goal) for s, goal in zip(cases, goals, strict=True)]
    begun = expert.routes_batch(believed, [s.state for s in cases], goals, roomy)
    prefixes, reached = [], []
    for case, routes in zip(cases, begun, strict=True):
        any_side = rng.random() < ANY_SIDE
        route = routes[int(rng.integers(len(routes)))] if any_side else expert.choose(routes, rng)
        prefix = route.actions[: int(rng.integers(1, LONGEST + 1))].copy()
        if rng.random() < INATTENTIVE:
            prefix[:] = 0.0, prefix[0, 1]
        prefixes.append(prefix)
        x, y, heading, speed = rollout(case.state, prefixes[-1])[-1]
        reached.append(State(x, y, wrap(heading), speed))
    ways_on = expert.plan_batch([s.scene for s in cases], reached, [s.target for s in cases], rng, roomy)
    for (i, case), prefix, state, way_on in zip(driven, prefixes, reached, ways_on, strict=True):
        if case.side is not None:
            way_on = search(case.scene, state, _side(case, prefix, state), manner)
        actions = np.concatenate([prefix, way_on])[:HORIZON]
        if not collides(case.scene, case.state, actions):
            made[i] = Continuation(actions, len(prefix))
    return made


def _side(case: Situation, prefix: NDArray[np.float64], reached: State) -> int:
    """Return the side to which a searching robot turns after actions [T, 2]."""
    past = to_world(case.state, case.history[:-1])
    track = np.concatenate([past, rollout(case.state, prefix)[:, :2]])
    side = turning_side(to_base(reached, track[-HISTORY:]))
    assert case.side is not None
    return case.side if side is None else side


def continued(
    rng: Generator, situations: Iterator[Situation], manner: expert.Manner = expert.BRISK
) -> Iterator[tuple[Situation, Continuation | None]]:
    """Yield each situation of an endless source with its continuation."""
    while True:
        batch = list(islice(situations, _BATCH))  # planning many at once is faster
        yield from zip(batch, continuations(rng, batch, manner), strict=True)
