# SPDX-License-Identifier: Apache-2.0
"""ExpertWeights: addresses of an action expert's weights on the device.

Matrices are row-major [fan_in, fan_out], of the model's type, as are norms and biases. Addresses are
multiples of 16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ExpertLayerWeights:
    """Addresses of one layer's weights; H hidden, D head_dim, I inner."""

    input_norm: int  # [H]
    qkv: int  # [H,(Hq+2Hkv)*D], queries, keys, values
    q_norm: int  # [D]
    k_norm: int  # [D]
    o: int  # [Hq*D,H]
    post_norm: int  # [H]
    gate_up: int  # [H,2I], gate columns first
    down: int  # [I,H]


@dataclass(frozen=True)
class ExpertWeights:
    """Addresses of all weights but those of the time embedding.

    owners: objects that keep the memory alive.
    """

    layers: tuple[ExpertLayerWeights, ...]
    in_proj: int  # [A,H]
    norm: int  # [H], of the last norm
    out_proj: int  # [H,A]
    out_bias: int  # [A]
    owners: tuple[Any, ...] = field(default=(), compare=False, repr=False)
