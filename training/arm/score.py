# SPDX-License-Identifier: Apache-2.0
"""Plays episodes with LeRobot's own inference of a policy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from lerobot.policies.pretrained import PreTrainedPolicy

from edgellm_tabletop.episodes.closed_loop import goal_of
from edgellm_tabletop.world import GOALS, INSTRUCTIONS, Tabletop
from training.arm.kind import EXECUTED, IMAGE, STATE, Processors

MakeChunk = Callable[[np.ndarray, np.ndarray, str], np.ndarray]


def chunk_maker(policy: PreTrainedPolicy, processors: Processors) -> MakeChunk:
    """Return a function that makes chunks.

    The function takes an image [H,W,3], a state [6] and an instruction, and returns joint targets [C,6].
    LeRobot's own inference: preprocessor, `predict_action_chunk`, postprocessor.
    """
    before, after = processors

    @torch.inference_mode()
    def make(image: np.ndarray, state: np.ndarray, instruction: str) -> np.ndarray:
        frame = torch.from_numpy(image.copy()).permute(2, 0, 1).float() / 255
        observation = before({STATE: torch.from_numpy(state), IMAGE: frame, "task": instruction})
        return after(policy.predict_action_chunk(observation))[0].cpu().numpy()

    return make


def play(make: MakeChunk, world: Tabletop, seed: int, delay_steps: int = 0) -> bool:
    """Play an episode with EXECUTED actions of each chunk.

    The arm holds its last target for `delay_steps` while a chunk is computed. Returns whether the block is
    placed.
    """
    world.reset(seed, goal_of(seed))
    torch.manual_seed(seed)  # of the noise that a SmolVLA begins with
    target = world.state
    while not world.ended:
        rows = make(world.image(), world.state, INSTRUCTIONS[world.goal])[:EXECUTED]
        for row in [*[target] * delay_steps, *rows]:
            if world.ended:
                break
            target = row
            world.step(target)
    return world.succeeded


def score(
    policy: PreTrainedPolicy, processors: Processors, episodes: int, first_seed: int, delay_steps: int = 0
) -> dict[str, int]:
    """Count the episodes of each goal in which the block is placed.

    The episodes are those of `edgellm evaluate arm` with the same seeds.
    """
    world, make = Tabletop(), chunk_maker(policy, processors)
    placed = dict.fromkeys(GOALS, 0)
    for seed in range(first_seed, first_seed + episodes):
        placed[goal_of(seed)] += play(make, world, seed, delay_steps)
    world.close()
    return placed
