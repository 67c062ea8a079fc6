# SPDX-License-Identifier: Apache-2.0
"""The flow-matching action expert in PyTorch: for training, and parity reference.

The expert is a small transformer over the action tokens of one trajectory. Layer i attends to the thinker's
KV cache of layer i and, without a causal mask, to the action tokens. The output is the velocity of the
rectified flow x_t = (1 - t) * noise + t * actions (Lipman et al. 2023, arXiv 2210.02747). Attention to the KV
cache follows pi0 (arXiv 2410.24164) and Alpamayo-R1 (arXiv 2511.00088).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ExpertDims:
    """Sizes of the expert; key-value heads and head_dim equal the thinker's."""

    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rms_norm_eps: float = 1e-6
    time_embedding_dim: int = 128
    time_min_period: float = 0.004
    time_max_period: float = 4.0
    action_dim: int = 2
    rtc_max_delay: int = 0  # longest clean prefix that it has learned; 0 = none


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight, in float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * y).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply half-split rotary embedding: x [B, H, T, D], cos and sin [B, T, D/2]."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    """Grouped-query attention of action tokens over [cached keys ; own keys]."""

    def __init__(self, dims: ExpertDims):
        super().__init__()
        self.dims = dims
        query, kv = dims.num_attention_heads * dims.head_dim, dims.num_key_value_heads * dims.head_dim
        self.q_proj = nn.Linear(dims.hidden_size, query, bias=False)
        self.k_proj = nn.Linear(dims.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(dims.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(query, dims.hidden_size, bias=False)
        self.q_norm = RMSNorm(dims.head_dim, dims.rms_norm_eps)
        self.k_norm = RMSNorm(dims.head_dim, dims.rms_norm_eps)

    def forward(
        self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        b, t, _ = x.shape
        heads = lambda y: y.view(b, t, -1, self.dims.head_dim)  # noqa: E731
        q = rotate(self.q_norm(heads(self.q_proj(x))).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(heads(self.k_proj(x))).transpose(1, 2), cos, sin)
        v = heads(self.v_proj(x)).transpose(1, 2)
        k, v = torch.cat((keys.to(k.dtype), k), dim=2), torch.cat((values.to(v.dtype), v), dim=2)
        groups = self.dims.num_attention_heads // self.dims.num_key_value_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, -1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, dims: ExpertDims):
        super().__init__()
        self.gate_proj = nn.Linear(dims.hidden_size, dims.intermediate_size, bias=False)
        self.up_proj = nn.Linear(dims.hidden_size, dims.intermediate_size, bias=False)
        self.down_proj = nn.Linear(dims.intermediate_size, dims.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, dims: ExpertDims):
        super().__init__()
        self.input_layernorm = RMSNorm(dims.hidden_size, dims.rms_norm_eps)
        self.self_attn = Attention(dims)
        self.post_attention_layernorm = RMSNorm(dims.hidden_size, dims.rms_norm_eps)
        self.mlp = MLP(dims)

    def forward(self, x: Tensor, *attention_inputs: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), *attention_inputs)
        return x + self.mlp(self.post_attention_layernorm(x))


class FlowExpert(nn.Module):
    """Velocity of the flow at (trajectory, time), given the thinker's KV cache."""

    def __init__(self, dims: ExpertDims):
        super().__init__()
        self.dims = dims
        self.in_proj = nn.Linear(dims.action_dim, dims.hidden_size)
        self.time_mlp = nn.Sequential(
            nn.Linear(dims.time_embedding_dim, dims.hidden_size),
            nn.SiLU(),
            nn.Linear(dims.hidden_size, dims.hidden_size),
        )
        self.layers = nn.ModuleList(Layer(dims) for _ in range(dims.num_hidden_layers))
        self.norm = RMSNorm(dims.hidden_size, dims.rms_norm_eps)
        self.out_proj = nn.Linear(dims.hidden_size, dims.action_dim)

    def time_embedding(self, time: Tensor) -> Tensor:
        """Compute Fourier features of time [...] -> [..., time_embedding_dim].

        Periods are spaced geometrically.
        """
        fraction = torch.linspace(0, 1, self.dims.time_embedding_dim // 2, device=time.device)
        period = (
            self.dims.time_min_period * (self.dims.time_max_period / self.dims.time_min_period) ** fraction
        )
        angle = 2 * math.pi * time.float()[..., None] / period
        return torch.cat((angle.sin(), angle.cos()), dim=-1)

    def forward(
        self,
        trajectory: Tensor,
        time: Tensor,
        cache: list[tuple[Tensor, Tensor]],
        mask: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        """Compute the velocity [B, T, A].

        trajectory [B, T, A]; time [B], or [B, T] with one for each action; cache per layer (keys, values)
        [B, Hkv, C, D]; mask [B, 1, T, C + T] bool, True = attend; cos, sin [B, T, D/2].
        """
        time = time[:, None] if time.ndim == 1 else time
        x = self.in_proj(trajectory) + self.time_mlp(self.time_embedding(time))
        for layer, (keys, values) in zip(self.layers, cache, strict=True):
            x = layer(x, keys, values, mask, cos, sin)
        return self.out_proj(self.norm(x))
