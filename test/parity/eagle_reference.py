# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3's arithmetic in PyTorch: one forward pass of a draft head over all rows.

There is no cache. A row is a token: its embedding e and a state g. Tensors have EAGLE's names
(fixtures/random_head.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu


@dataclass
class EagleReference:
    """A head in the layout `eagle`."""

    directory: Path
    layers: int = 1
    heads: int = 4
    kv_heads: int = 2
    epsilon: float = 1e-5
    theta: float = 10000.0
    norm_before_residual: bool = False
    feeds_back_normed_state: bool = False
    lm_head: Tensor | None = None  # the base's, if the head has none

    def __post_init__(self) -> None:
        stored = load_file(self.directory / "model.safetensors")
        self.tensors = {name: value.float() for name, value in stored.items() if value.is_floating_point()}

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        """Make g of three states [S,Ht] of the base."""
        if "fc_norm.0.weight" in self.tensors:
            states = [self._norm(f"fc_norm.{i}", state) for i, state in enumerate(states)]
        joined = torch.cat(list(states), -1)
        if "input_norm.weight" in self.tensors:
            joined = self._norm("input_norm", joined)
        return self._linear("fc", joined)

    def forward(self, e: Tensor, g: Tensor, positions: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Run rows e, g [S,H] at positions [S]; return logits and the next rows' states.

        The rows attend to each other as seen [S,S] says.
        """
        x = g
        for i in range(self.layers):
            module = f"layers.{i}" if i else "midlayer"
            a = self._norm(f"{module}.input_layernorm", x if i else e)
            residual = x
            if i == 0:
                normed = self._norm(f"{module}.hidden_norm", g)
                residual = normed if self.norm_before_residual else g
                a = torch.cat([a, normed], -1)
            y = residual + self._attention(f"{module}.self_attn", a, positions, seen)
            b = self._norm(f"{module}.post_attention_layernorm", y)
            gate, up = (self._linear(f"{module}.mlp.{name}_proj", b) for name in ("gate", "up"))
            x = y + self._linear(f"{module}.mlp.down_proj", silu(gate) * up)
        normed = self._norm("norm", x)
        head = self.tensors["lm_head.weight"] if self.lm_head is None else self.lm_head
        return linear(normed, head), normed if self.feeds_back_normed_state else x

    def _attention(self, module: str, a: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        q = self._heads(f"{module}.q", a, self.heads)
        k = self._heads(f"{module}.k", a, self.kv_heads)
        v = self._linear(f"{module}.v_proj", a).unflatten(-1, (self.kv_heads, -1)).transpose(0, 1)
        q, k = self._rotate(q, positions), self._rotate(k, positions)
        groups = self.heads // self.kv_heads
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        attended = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=q.shape[-1] ** -0.5)
        return self._linear(f"{module}.o_proj", attended.transpose(0, 1).flatten(1))

    def _heads(self, name: str, a: Tensor, count: int) -> Tensor:
        x = self._linear(f"{name}_proj", a).unflatten(-1, (count, -1))
        if f"{name}_norm.weight" in self.tensors:
            x = self._norm(f"{name}_norm", x)
        return x.transpose(0, 1)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angles = positions[:, None] * self.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        cos, sin = angles.cos().float(), angles.sin().float()
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        mean_square = x.pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(mean_square + self.epsilon) * self.tensors[f"{name}.weight"]

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))
