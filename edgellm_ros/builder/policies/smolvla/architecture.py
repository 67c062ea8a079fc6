# SPDX-License-Identifier: Apache-2.0
"""Sizes of SmolVLA.

The sizes are those of SmolVLM's vision tower and text layers, and of the action expert.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgellm_ros.builder.policies.siglip import SiglipTower
from edgellm_ros.engine_directory.language_model_config import LanguageModelConfig

WITH_EXPERT = "model.vlm_with_expert"
VLM = f"{WITH_EXPERT}.vlm.model"
EXPERT = f"{WITH_EXPERT}.lm_expert"
TEXT_MODEL = f"{VLM}.text_model"
EMBEDDING = f"{TEXT_MODEL}.embed_tokens.weight"
CONNECTOR = f"{VLM}.connector.modality_projection"


@dataclass(frozen=True)
class TowerArchitecture(SiglipTower):
    """SigLIP with the connector of SmolVLM."""

    merge: int  # patches of a token's side

    @property
    def tokens(self) -> int:
        """Return the rows that an image becomes."""
        return (self.side // self.merge) ** 2


@dataclass(frozen=True)
class SmolVLAArchitecture:
    """All that the graphs of a SmolVLA use."""

    llm: LanguageModelConfig  # the layers of the prefix
    intermediate_size: int
    epsilon: float  # of every RMSNorm
    tower: TowerArchitecture
    expert_hidden_size: int
    expert_intermediate_size: int
    self_attention: tuple[bool, ...]  # of each layer: whether actions attend to each other, too
    state_dim: int
    action_dim: int
    horizon: int
    max_prefix_rows: int
    min_period: float  # of the time features, in flow time
    max_period: float

    @property
    def kv_width(self) -> int:
        """Return the number of values of all keys of a row."""
        return self.llm.num_key_value_heads * self.llm.head_dim
