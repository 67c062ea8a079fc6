# SPDX-License-Identifier: Apache-2.0
"""Episodes of the arena's analytic driver, to compare a model's motion with.

The driver has made the training data. It knows the whole scene, needs no time, and goes on as it planned.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm_arena.driving import expert
from edgellm_arena.driving.smoothness import named_jumps
from edgellm_arena.episodes.closed_loop import Plan
from edgellm_arena.episodes.delayed_loop import drive_delayed
from edgellm_arena.episodes.episode import EPISODE_SEEDS, World, make_episode


def play_driver(seed: int, number: int) -> dict[str, Any]:
    """Let the driver drive an episode, with a plan every 0.8 s; return its outcome.

    The outcome has the numbers of the arena's event `outcome`, without words and pictures.
    """
    episode = make_episode(seed * EPISODE_SEEDS + number)
    world, rng = World(episode), np.random.default_rng(episode.seed)
    seconds = []

    def think(_: NDArray[np.uint8], __: int) -> Plan:
        start = time.perf_counter()
        actions = expert.plan(episode.scene, world.state, episode.target, rng)
        seconds.append(time.perf_counter() - start)
        return Plan("", actions)

    driven = drive_delayed(world, think)
    return {
        "number": number,
        "seed": episode.seed,
        "family": episode.family,
        "outcome": world.outcome.value,
        "time": world.time,
        "mean_speed": world.mean_speed(),
        "least_clearance": world.least_clearance(),
        "plans": len(seconds),
        "plan_seconds": seconds,
        "first_words_seconds": [],
        "part_seconds": {},
        "clipped_actions": driven.clipped,
        "picture": None,
        **named_jumps(world.track, driven.drivers, driven.continuations),
    }
