# SPDX-License-Identifier: Apache-2.0
"""FusedWeights: addresses of a decoder's weights on the device.

Matrices are as in the engine's file: row-major [fan_in, fan_out], of the model's type, as are norms and
biases. Quantised ones are as in `quantized.cuh`: values, scales, zero points. Addresses are multiples of 16
bytes. 0 = the model has none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class FusedLayerWeights:
    """Addresses of one layer's weights; H hidden, D head_dim, I inner.

    A layer has a mixer (attention, or what is recurrent) and a feed-forward block, or one of them. Of a
    recurrent mixer: C channels of the convolution, K its taps, n heads, V values of all heads.
    """

    input_norm: int = 0  # [H]
    qkv: int = 0  # [H,(Hq+2Hkv)*D], queries, keys, values; with gates (2Hq+2Hkv)*D, each beside its query
    o: int = 0  # [Hq*D,H]
    post_norm: int = 0  # [H]
    gate_up: int = 0  # [H,2I], gate columns first; [H,I] with squared ReLU
    down: int = 0  # [I,H]
    qkv_bias: int = 0  # as many as qkv has columns
    q_norm: int = 0  # [D]
    k_norm: int = 0  # [D]
    o_bias: int = 0  # [H]
    gate_up_bias: int = 0  # as many as gate_up has columns
    down_bias: int = 0  # [H]
    state_norm: int = 0  # [H], of a draft head's first layer, whose qkv is [2H,(Hq+2Hkv)*D]
    in_proj: int = (
        0  # [H,C+V+2n] channels, gate, strengths, decays; of Mamba2 [H,V+C+n] gate, channels, steps
    )
    out_proj: int = 0  # [V,H]
    taps: int = 0  # [K,C] fp32
    conv_bias: int = 0  # [C] fp32
    decay: int = 0  # [n] fp32: -exp(A_log)
    dt_bias: int = 0  # [n] fp32
    skip: int = 0  # [n] fp32: D of Mamba2
    mixer_norm: int = 0  # fp32, of the result: [V/n], of Mamba2 [V]


@dataclass(frozen=True)
class FusedWeights:
    """Addresses of all weights.

    - lm_head: [V,H] if the shape is tied, else [H,V], which may be quantised; 0 = each run's tensors have it,
      as `embedding` or `lm_head.weight`
    - owners: objects that keep the memory alive
    """

    layers: tuple[FusedLayerWeights, ...]
    norm: int  # [H], of the last norm
    lm_head: int = 0
    owners: tuple[Any, ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True)
class FusionWeights:
    """Addresses of the weights of a fusion or projection.

    Multiples of 16 bytes; 0 = there is none. owners: objects that keep the memory alive.
    """

    fc: int  # [states*state_size,fused_size]
    bias: int = 0  # [fused_size]
    norms: tuple[int, int, int] = (0, 0, 0)  # [state_size] each, or the thirds of a joined norm
    owners: tuple[Any, ...] = field(default=(), compare=False, repr=False)
