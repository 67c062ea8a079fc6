# SPDX-License-Identifier: Apache-2.0
"""Sizes of pi0 and pi0.5, and the names of their tensors.

The sizes are those of PaliGemma (SigLIP and Gemma), and of an action expert with Gemma's layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgellm_ros.builder.model.decoder import RMSNorm
from edgellm_ros.builder.policies.siglip import SiglipTower
from edgellm_ros.engine_directory.language_model_config import LanguageModelConfig

MODEL = "model"
PALIGEMMA = f"{MODEL}.paligemma_with_expert.paligemma"
TOWER = f"{PALIGEMMA}.model.vision_tower"
PROJECTOR = f"{PALIGEMMA}.model.multi_modal_projector"
TEXT = f"{PALIGEMMA}.model.language_model"
EXPERT = f"{MODEL}.paligemma_with_expert.gemma_expert.model"
EMBEDDING = f"{TEXT}.embed_tokens.weight"

# What the models have in all variants of Gemma that their code knows.
HEADS, KV_HEADS, TOWER_HEADS = 8, 1, 16
NORM = RMSNorm(1e-6, shift=1.0)
TOWER_EPSILON = 1e-6


@dataclass(frozen=True)
class PiArchitecture:
    """All that the graphs of a pi0 or pi0.5 use."""

    llm: LanguageModelConfig  # the layers of the prefix
    intermediate_size: int
    tower: SiglipTower
    expert_hidden_size: int
    expert_intermediate_size: int
    adaptive: bool  # pi0.5: the time scales the expert's norms, and the state is in the prompt
    state_dim: int
    action_dim: int
    horizon: int
    max_prefix_rows: int
    min_period: float  # of the time features, in flow time
    max_period: float

    @property
    def periods(self) -> tuple[float, float]:
        """Return the shortest and the longest period of the time features."""
        return self.min_period, self.max_period
