# SPDX-License-Identifier: Apache-2.0
"""Arena scenes that training never saw, to compare answers on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgellm_arena.episodes.situation import Situation, sample_situation, split_rng
from edgellm_arena.world.renderer import render
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams

MAX_TOKENS = 64


@dataclass(frozen=True)
class Scene:
    """A question that training never saw."""

    prompt: str
    image: np.ndarray
    history: np.ndarray
    noise_seed: int

    def request(self, logprobs: int = 0) -> LLMGenerationRequest:
        """It as a greedy request for an answer and one trajectory."""
        return LLMGenerationRequest(
            prompt=self.prompt,
            images=(self.image,),
            history=self.history,
            sampling=SamplingParams(max_tokens=MAX_TOKENS),
            logprobs=logprobs,
            action_samples=1,
            noise_seed=self.noise_seed,
        )


def scenes(count: int, seed: int = 2026) -> list[Scene]:
    rng = split_rng(seed, "test")
    return [_scene(sample_situation(rng, split="test"), rng, i) for i in range(count)]


def _scene(situation: Situation, rng: np.random.Generator, index: int) -> Scene:
    image = render(situation.scene, situation.state, rng)
    return Scene(situation.command.text, image, np.asarray(situation.history), index)
