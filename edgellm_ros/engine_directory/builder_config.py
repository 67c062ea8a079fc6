# SPDX-License-Identifier: Apache-2.0
"""Choices at the export of an engine directory."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm_ros.engine_directory.choices import KV_CACHES


@dataclass(frozen=True)
class BuilderConfig:
    """Choices at export: limits and extra bindings.

    Limits are the sizes of buffers and profiles; lengths are in tokens.
    """

    max_batch_size: int = 4
    max_input_len: int = 320  # tokens of one run; longer prompts are computed in several
    max_kv_cache_capacity: int = 448  # prompt plus answer of one sequence; static in the graph
    max_lora_rank: int = 0  # 0 = no LoRA inputs
    max_action_samples: int = 64  # trajectories of one request
    hidden_state_layers: tuple[int, ...] = ()  # layers (from 1) whose hidden states are outputs
    lm_head_input: bool = False  # the matrix of the LM head is an input
    kv_cache: str | None = None  # type of the KV cache, one of KV_CACHES; None = the precision

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_action_samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_kv_cache_capacity <= self.max_input_len:
            raise ValueError(
                f"max_kv_cache_capacity {self.max_kv_cache_capacity} must be greater than "
                f"max_input_len {self.max_input_len}"
            )
        if self.max_input_len < 2:
            raise ValueError(f"max_input_len must be at least 2, got {self.max_input_len}")
        if self.max_lora_rank < 0:
            raise ValueError(f"max_lora_rank must not be negative, got {self.max_lora_rank}")
        layers = self.hidden_state_layers
        if list(layers) != sorted(set(layers)) or (layers and layers[0] < 1):
            raise ValueError(f"hidden_state_layers must be rising numbers from 1, got {list(layers)}")
        if self.kv_cache not in (None, *KV_CACHES):
            raise ValueError(f"kv_cache must be {', '.join(KV_CACHES)} or None, got {self.kv_cache!r}")
