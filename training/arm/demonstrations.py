# SPDX-License-Identifier: Apache-2.0
"""Demonstrations by the scripted controller, as rows of a SampleStream.

A share of them begins with a miss (`misses.py`), so that a policy learns to grasp again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edgellm_tabletop.units import JOINTS
from edgellm_tabletop.world import GOALS, IMAGE_SIZE, Tabletop
from training.arm.misses import MISSES, miss
from training.stream import Chunk, Fields

CHUNK_SIZE = 40  # actions of a row: 4 s
MISS_SHARE, MISS_DRAWS = 0.3, 20  # of the episodes that begin with a miss; draws of one
CLEAN_SHARE = 0.4  # of the episodes: without noise
NOISY_STEPS, NOISE = 0.4, (0.1, 0.6)  # share of an episode's steps with noise, its standard deviation
ROWS = 16  # of a chunk of the stream

DEMONSTRATION_FIELDS: Fields = {
    "image": ((IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8),
    "state": ((len(JOINTS),), np.float32),
    "action": ((CHUNK_SIZE, len(JOINTS)), np.float32),
    "is_pad": ((CHUNK_SIZE,), np.bool_),
    "goal": ((), np.uint8),  # place in GOALS
}


@dataclass(frozen=True)
class Moment:
    """What a policy sees, and the controller's joint targets, in LeRobot's units."""

    image: np.ndarray  # [H, W, 3] uint8
    state: np.ndarray  # [6] float32
    targets: np.ndarray  # [6] float32


def draw_miss(rng: np.random.Generator) -> str | None:
    """Draw what an episode begins with: one of MISSES, or None in most."""
    return str(rng.choice(list(MISSES))) if rng.random() < MISS_SHARE else None


def begin(world: Tabletop, rng: np.random.Generator, seed: int, goal: str) -> bool:
    """Begin an episode, in some of them after a miss.

    Returns False if none of the drawn misses is one to mend.
    """
    kind = draw_miss(rng)
    for _ in range(MISS_DRAWS):
        world.reset(seed, goal)
        if kind is None or miss(world, rng, kind):
            return True
    return False


def demonstrate(world: Tabletop, rng: np.random.Generator, seed: int, goal: str) -> list[Moment]:
    """Play an episode with the scripted controller; [] if the block is not placed.

    In some episodes noise moves the arm away, and the controller's targets lead back. What leads to a miss is
    not recorded.
    """
    if not begin(world, rng, seed, goal):
        return []
    scale = 0.0 if rng.random() < CLEAN_SHARE else rng.uniform(*NOISE)
    moments = []
    while not world.ended:
        image, state = world.image(), world.state
        noise = rng.normal(0, scale, 3) if scale and rng.random() < NOISY_STEPS else None
        moments.append(Moment(image, state, world.expert_targets(noise)))
    return moments if world.succeeded else []


def write_row(chunk: Chunk, i: int, moments: list[Moment], step: int) -> None:
    """Fill row i of a chunk with a moment of an episode, and the actions from there.

    Actions after the end repeat the last one, and are marked as padding.
    """
    actions = [moment.targets for moment in moments[step : step + CHUNK_SIZE]]
    missing = CHUNK_SIZE - len(actions)
    chunk["image"][i], chunk["state"][i] = moments[step].image, moments[step].state
    chunk["action"][i] = actions + [actions[-1]] * missing
    chunk["is_pad"][i] = np.arange(CHUNK_SIZE) >= len(actions)


def demonstration_writer(seed: int) -> Callable[[Chunk, int], None]:
    """Make a SampleStream's function that writes moments of demonstrations."""
    world, rng = Tabletop(), np.random.default_rng([seed, 4])
    waiting: deque[tuple[int, list[Moment], int]] = deque()

    def write(chunk: Chunk, i: int) -> None:
        while not waiting:
            goal = int(rng.integers(len(GOALS)))
            moments = demonstrate(world, rng, int(rng.integers(2**31)), list(GOALS)[goal])
            waiting.extend((goal, moments, int(step)) for step in rng.permutation(len(moments)))
        chunk["goal"][i], moments, step = waiting.popleft()
        write_row(chunk, i, moments, step)

    return write
