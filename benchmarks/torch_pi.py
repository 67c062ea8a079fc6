# SPDX-License-Identifier: Apache-2.0
"""pi0.5 in PyTorch, eager or compiled, with the weights of a checkpoint.

Written for speed: keys and values of the prefix are computed once, attention is PyTorch's fused one, and a
compiled Euler step is one graph. Source of the model: LeRobot 0.6.1, policies/pi05 and policies/pi_gemma.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch._dynamo
import torch.nn.functional as F
from safetensors.torch import load_file

from benchmarks.pi_shapes import EXPERT, HEADS, PALIGEMMA, PROJECTOR, TEXT, TOWER, TOWER_HEADS, PiSizes

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
EPSILON = 1e-6  # of all norms
PERIODS = 4e-3, 4.0  # of the time features

Context = list[tuple[torch.Tensor, torch.Tensor]]  # keys and values [1,1,S,D] by layer


class TorchPi05:
    """The model on a device; one chunk of actions at a time."""

    def __init__(self, checkpoint: Path, sizes: PiSizes, precision: str, device: str) -> None:
        self._sizes, self._device, self._dtype = sizes, device, DTYPES[precision]
        self._tensors: dict[str, torch.Tensor] = {}
        for file in sorted(checkpoint.glob("model-*.safetensors")):
            for name, tensor in load_file(file, device=device).items():
                self._tensors[name] = tensor.to(self._dtype)
        for tensor in self._tensors.values():  # else a CUDA graph copies the weights in every run
            torch._dynamo.mark_static_address(tensor)

    @torch.no_grad()
    def sampler(
        self, steps: int, mode: str | None
    ) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        """Return a function that computes normalised actions [1,T,A].

        The function takes pixels [N,3,side,side] fp32, tokens [L] int64 and noise [1,T,A] fp32. mode: of
        torch.compile; None = eager.
        """
        prefix, step = self._prefix, partial(self._step, steps=steps)
        if mode is not None:
            compiled = partial(torch.compile, mode=mode, fullgraph=True, dynamic=False)
            prefix, step = compiled(prefix), compiled(step)

        @torch.no_grad()
        def sample(pixels: torch.Tensor, tokens: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
            if mode is not None:
                torch.compiler.cudagraph_mark_step_begin()
            context, x = prefix(pixels, tokens), noise
            for number in range(steps):
                time = torch.full((1,), 1 - number / steps, device=self._device)
                x = step(x, time, context)
            return x.clone()

        return sample

    def _prefix(self, pixels: torch.Tensor, tokens: torch.Tensor) -> Context:
        """Compute keys and values of images and prompt."""
        sizes, hidden = self._sizes, self._sizes.hidden
        words = F.embedding(tokens, self._tensors[f"{PALIGEMMA}.lm_head.weight"]) * math.sqrt(hidden)
        x = torch.cat([self._images(pixels).reshape(-1, hidden), words])[None]
        rope = self._rope(torch.arange(x.shape[1], device=self._device))
        context = []
        for i in range(sizes.layers):
            layer = f"{TEXT}.layers.{i}"
            normed = self._norm(f"{layer}.input_layernorm", x)
            q, k, v = self._heads(layer, normed, rope)
            context.append((k, v))
            if i == sizes.layers - 1:
                break
            x = x + self._attend(layer, q, k, v)
            x = x + self._mlp(layer, self._norm(f"{layer}.post_attention_layernorm", x))
        return context

    def _step(self, x: torch.Tensor, time: torch.Tensor, context: Context, steps: int) -> torch.Tensor:
        """Take an Euler step from x [1,T,A] at a time [1]."""
        sizes, condition = self._sizes, self._condition(time)
        rows = context[0][0].shape[2]
        rope = self._rope(torch.arange(rows, rows + sizes.horizon, device=self._device))
        y = self._linear("model.action_in_proj", x.to(self._dtype))
        for i, (keys, values) in enumerate(context):
            layer = f"{EXPERT}.layers.{i}"
            normed, gate = self._adaptive(f"{layer}.input_layernorm", y, condition)
            q, k, v = self._heads(layer, normed, rope)
            k, v = torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2)
            y = y + gate * self._attend(layer, q, k, v)
            normed, gate = self._adaptive(f"{layer}.post_attention_layernorm", y, condition)
            y = y + gate * self._mlp(layer, normed)
        y, _ = self._adaptive(f"{EXPERT}.norm", y, condition)
        return x - self._linear("model.action_out_proj", y).float() / steps

    def _images(self, pixels: torch.Tensor) -> torch.Tensor:
        sizes, heads = self._sizes, TOWER_HEADS
        embed = f"{TOWER}.embeddings"
        kernel, bias = (self._tensors[f"{embed}.patch_embedding.{name}"] for name in ("weight", "bias"))
        x = F.conv2d(pixels.to(self._dtype), kernel, bias, stride=sizes.patch).flatten(2).transpose(1, 2)
        x = x + self._tensors[f"{embed}.position_embedding.weight"]
        for i in range(sizes.vision_layers):
            layer = f"{TOWER}.encoder.layers.{i}"
            normed = self._layer_norm(f"{layer}.layer_norm1", x)
            q, k, v = (
                self._linear(f"{layer}.self_attn.{name}_proj", normed)
                .unflatten(-1, (heads, -1))
                .transpose(1, 2)
                for name in "qkv"
            )
            attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            x = x + self._linear(f"{layer}.self_attn.out_proj", attended)
            raised = self._linear(f"{layer}.mlp.fc1", self._layer_norm(f"{layer}.layer_norm2", x))
            x = x + self._linear(f"{layer}.mlp.fc2", F.gelu(raised, approximate="tanh"))
        return self._linear(PROJECTOR, self._layer_norm(f"{TOWER}.post_layernorm", x))

    def _condition(self, time: torch.Tensor) -> torch.Tensor:
        low, high = PERIODS
        share = torch.linspace(0, 1, self._sizes.expert_hidden // 2, device=self._device)
        angles = time[:, None] * 2 * math.pi / (low * (high / low) ** share)
        features = torch.cat([angles.sin(), angles.cos()], dim=1).to(self._dtype)
        raised = self._linear("model.time_mlp_out", F.silu(self._linear("model.time_mlp_in", features)))
        return F.silu(raised)

    def _heads(
        self, layer: str, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = (
            self._linear(f"{layer}.self_attn.{name}_proj", x).unflatten(-1, (-1, self._sizes.head_dim))
            for name in "qkv"
        )
        cos, sin = rope
        q, k = (
            torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
            for each in (q.transpose(1, 2), k.transpose(1, 2))
            for a, b in [each.chunk(2, dim=-1)]
        )
        return q, k, v.transpose(1, 2)

    def _attend(self, layer: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        shared = (each.expand(-1, HEADS, -1, -1) for each in (k, v))
        attended = F.scaled_dot_product_attention(q, *shared).transpose(1, 2).flatten(2)
        return self._linear(f"{layer}.self_attn.o_proj", attended)

    def _rope(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        half = self._sizes.head_dim // 2
        scale = 10000.0 ** (torch.arange(half, device=self._device) / half)
        angles = places[:, None] / scale
        return angles.cos().to(self._dtype), angles.sin().to(self._dtype)

    def _mlp(self, layer: str, x: torch.Tensor) -> torch.Tensor:
        gate, up = (self._linear(f"{layer}.mlp.{name}_proj", x) for name in ("gate", "up"))
        return self._linear(f"{layer}.mlp.down_proj", F.gelu(gate, approximate="tanh") * up)

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        scale = 1 + self._tensors[f"{name}.weight"].float()
        return F.rms_norm(x.float(), scale.shape, scale, EPSILON).to(self._dtype)

    def _adaptive(
        self, name: str, x: torch.Tensor, condition: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scale, shift, gate = self._linear(f"{name}.dense", condition)[:, None].chunk(3, dim=-1)
        normed = F.rms_norm(x.float(), x.shape[-1:], None, EPSILON)
        return (normed * (1 + scale.float()) + shift.float()).to(self._dtype), gate

    def _layer_norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        scale, shift = (self._tensors[f"{name}.{each}"] for each in ("weight", "bias"))
        return F.layer_norm(x, scale.shape, scale, shift, EPSILON)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.bias"))
