# SPDX-License-Identifier: Apache-2.0
"""The flow-matching expert once more, in plain PyTorch.

The code is written from its formulas and shares no code with the builder or the training. It is slow and
literal on purpose: keys are repeated for every query head, cache and own keys are joined, batch rows run one
by one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


class ExpertReference:
    """An action expert that computes velocities and samples actions.

    `weights`: tensors of action_expert/model.safetensors in fp32; `config`: its config.json. rotary_dim:
    values of a head that RoPE rotates; None = all.
    """

    def __init__(self, weights: dict[str, Tensor], config: dict, rotary_dim: int | None = None) -> None:
        self.weights = weights
        self.config = config
        self.rotary_dim = rotary_dim or config["head_dim"]

    @classmethod
    def load(cls, directory: Path, rotary_dim: int | None = None) -> ExpertReference:
        weights = load_file(directory / "model.safetensors")
        config = json.loads((directory / "config.json").read_text())
        return cls({name: tensor.float() for name, tensor in weights.items()}, config, rotary_dim)

    def velocity(
        self,
        trajectory: Tensor,
        time: float | Tensor,
        cache: Sequence[tuple[Tensor, Tensor]],
        start_position: int,
    ) -> Tensor:
        """Return the velocity [T, A] of one trajectory [T, A].

        time: of all steps, or of each [T]. cache: keys and values [Hkv, length, D] of each layer, all rows
        valid.
        """
        eps = self.config["rms_norm_eps"]
        hidden = self._linear("in_proj", trajectory) + self._time(time)
        cos, sin = self._rotation(start_position, trajectory.shape[0])
        for i, (keys, values) in enumerate(cache):
            layer = f"layers.{i}"
            normed = rms_norm(hidden, self.weights[f"{layer}.input_layernorm.weight"], eps)
            hidden = hidden + self._attention(f"{layer}.self_attn", normed, keys, values, cos, sin)
            normed = rms_norm(hidden, self.weights[f"{layer}.post_attention_layernorm.weight"], eps)
            hidden = hidden + self._mlp(f"{layer}.mlp", normed)
        return self._linear("out_proj", rms_norm(hidden, self.weights["norm.weight"], eps))

    def sample(
        self, noise: Tensor, steps: int, cache: Sequence[tuple[Tensor, Tensor]], start_position: int
    ) -> Tensor:
        """Euler's method from noise [T, A] at time 0 to the normalised actions at time 1."""
        trajectory = noise
        for step in range(steps):
            trajectory = trajectory + self.velocity(trajectory, step / steps, cache, start_position) / steps
        return trajectory

    def physical(self, actions: Tensor) -> Tensor:
        """Normalised actions in the units of the action space, within its limits."""
        space = self.config["action_space"]
        scaled = actions * torch.tensor(space["std"]) + torch.tensor(space["mean"])
        return scaled.clamp(torch.tensor(space["low"]), torch.tensor(space["high"]))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _time(self, time: float | Tensor) -> Tensor:
        fraction = torch.linspace(0, 1, self.config["time_embedding_dim"] // 2)
        low, high = self.config["time_min_period"], self.config["time_max_period"]
        angle = 2 * math.pi * torch.as_tensor(time)[..., None] / (low * (high / low) ** fraction)
        features = torch.cat([angle.sin(), angle.cos()], dim=-1)
        raised = torch.nn.functional.silu(self._linear("time_mlp.0", features))
        return self._linear("time_mlp.2", raised)

    def _rotation(self, start: int, steps: int) -> tuple[Tensor, Tensor]:
        size = self.rotary_dim
        frequency = self.config["rope_theta"] ** (-torch.arange(0, size, 2).float() / size)
        angle = (start + torch.arange(steps).float())[:, None] * frequency
        return angle.cos(), angle.sin()

    def _attention(
        self, name: str, x: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        eps, size = self.config["rms_norm_eps"], self.config["head_dim"]
        q = self._linear(f"{name}.q_proj", x).view(len(x), heads, size).transpose(0, 1)
        k = self._linear(f"{name}.k_proj", x).view(len(x), kv_heads, size).transpose(0, 1)
        v = self._linear(f"{name}.v_proj", x).view(len(x), kv_heads, size).transpose(0, 1)
        q = rotate(rms_norm(q, self.weights[f"{name}.q_norm.weight"], eps), cos, sin)
        k = rotate(rms_norm(k, self.weights[f"{name}.k_norm.weight"], eps), cos, sin)
        k = torch.cat([keys, k], dim=1).repeat_interleave(heads // kv_heads, dim=0)
        v = torch.cat([values, v], dim=1).repeat_interleave(heads // kv_heads, dim=0)
        attended = torch.softmax(q @ k.transpose(1, 2) / math.sqrt(size), dim=-1) @ v
        return self._linear(f"{name}.o_proj", attended.transpose(0, 1).reshape(len(x), heads * size))

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        gate = torch.nn.functional.silu(self._linear(f"{name}.gate_proj", x))
        return self._linear(f"{name}.down_proj", gate * self._linear(f"{name}.up_proj", x))


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """First half of the rotated values paired with the second, as in the text model."""
    size = cos.shape[-1]
    first, second, rest = x.split([size, size, x.shape[-1] - 2 * size], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
