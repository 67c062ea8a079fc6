# SPDX-License-Identifier: Apache-2.0
"""Configuration of rotary position embeddings.

The configuration is in `config.json` of an engine directory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding."""

    theta: float  # the base that the checkpoint gives
    frequencies: tuple[float, ...]  # radians per position of each rotated pair, float32 values
    attention_scaling: float  # factor of cos and sin
    mrope_section: tuple[int, ...]  # pairs of time, height and width; empty = positions 0, 1, 2, ...
    mrope_interleaved: bool  # pairs alternate (t h w t h w ...) as in Qwen3; else blocks, as in Qwen2-VL

    def __post_init__(self) -> None:
        if self.theta <= 0:
            raise ValueError(f"theta must be positive, got {self.theta}")
        if not self.frequencies or not all(0 <= value < math.inf for value in self.frequencies):
            raise ValueError(f"frequencies must be finite and not negative, got {self.frequencies}")
        if not 0 < self.attention_scaling < math.inf:
            raise ValueError(f"attention_scaling must be positive, got {self.attention_scaling}")
        if self.mrope_section and len(self.mrope_section) != 3:
            raise ValueError(
                f"mrope_section must have 3 values (time, height, width), got {self.mrope_section}"
            )
        if self.mrope_section and sum(self.mrope_section) != len(self.frequencies):
            raise ValueError(
                f"mrope_section {self.mrope_section} must sum to the {len(self.frequencies)} frequencies"
            )

    @property
    def rotary_dim(self) -> int:
        """Return the number of rotated values of a head, which are its first."""
        return 2 * len(self.frequencies)


def check_heads(num_attention_heads: int, num_key_value_heads: int, head_dim: int, rope: RopeConfig) -> None:
    """Check the heads of an attention layer, and that its RoPE fits.

    ValueError otherwise.
    """
    if num_attention_heads % num_key_value_heads:
        raise ValueError(
            f"num_attention_heads {num_attention_heads} is not a multiple of "
            f"num_key_value_heads {num_key_value_heads}"
        )
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim must be even, got {head_dim}")
    if rope.rotary_dim > head_dim:
        raise ValueError(
            f"rope has {len(rope.frequencies)} frequencies, more than the pairs of head_dim {head_dim}"
        )
