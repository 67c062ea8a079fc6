# SPDX-License-Identifier: Apache-2.0
"""Sizes of recurrent layers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta net."""

    hidden_size: int
    key_heads: int
    value_heads: int  # a multiple of key_heads
    key_dim: int  # of a head
    value_dim: int  # of a head
    conv_kernel: int
    epsilon: float

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def conv_dim(self) -> int:
        return 2 * self.keys + self.values

    @property
    def projections(self) -> dict[str, int]:
        """Return the widths of the layers that read the input, by name."""
        return {
            "in_proj_qkv": self.conv_dim,
            "in_proj_z": self.values,
            "in_proj_b": self.value_heads,
            "in_proj_a": self.value_heads,
        }


@dataclass(frozen=True)
class Mamba2:
    """A Mamba2 layer."""

    hidden_size: int
    heads: int
    head_dim: int
    groups: int  # heads of one group share B and C
    state_size: int
    conv_kernel: int
    conv_bias: bool
    bias: bool  # of in_proj and out_proj
    epsilon: float
    time_step_min: float

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        return self.inner + 2 * self.groups * self.state_size
