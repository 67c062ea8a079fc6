# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters on the text model, saved in PEFT's format.

Source: Hu et al. 2021, arXiv 2106.09685.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

TARGETS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
_PREFIX = "model.language_model.layers"


class LoraLinear(nn.Module):
    """y = linear(x) + scale * (x A^T) B^T, A [r, K], B [N, r]; `linear` is frozen."""

    def __init__(self, linear: nn.Linear, rank: int, scale: float):
        super().__init__()
        self.linear, self.scale = linear.requires_grad_(False), scale
        self.a = nn.Parameter(torch.empty(rank, linear.in_features))
        self.b = nn.Parameter(torch.empty(linear.out_features, rank))
        self.reset()

    def reset(self) -> None:
        """Initialise the adapter so that it has no effect."""
        nn.init.kaiming_uniform_(self.a, a=5**0.5)
        nn.init.zeros_(self.b)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.scale * F.linear(F.linear(x, self.a), self.b)


def put_adapters(thinker: nn.Module, rank: int, alpha: float) -> dict[str, LoraLinear]:
    """Put an adapter on every linear layer of the text model, in place.

    Returns the adapters by the layer's name.
    """
    adapters = {}
    for i, layer in enumerate(thinker.model.language_model.layers):
        for block, names in TARGETS.items():
            for name in names:
                parent = getattr(layer, block)
                adapter = LoraLinear(getattr(parent, name), rank, alpha / rank)
                setattr(parent, name, adapter)
                adapters[f"{_PREFIX}.{i}.{block}.{name}"] = adapter
    return adapters


def adapter_rank(directory: Path) -> tuple[int, float]:
    """Return rank and alpha of an adapter of `save_adapter`."""
    config = json.loads((directory / "adapter_config.json").read_text())
    return config["r"], config["lora_alpha"]


def load_adapter(directory: Path, adapters: dict[str, LoraLinear]) -> None:
    """Read the weights of `save_adapter` into adapters of the same rank, in place."""
    weights = load_file(directory / "adapter_model.safetensors")
    for name, adapter in adapters.items():
        for matrix, value in (("A", adapter.a), ("B", adapter.b)):
            value.data.copy_(weights[f"base_model.model.{name}.lora_{matrix}.weight"])


def save_adapter(directory: Path, adapters: dict[str, LoraLinear], rank: int, alpha: float) -> None:
    """Write `adapter_config.json` and, in float16, `adapter_model.safetensors`."""
    names = "|".join(name.removesuffix("_proj") for group in TARGETS.values() for name in group)
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": None,
        "task_type": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": rf".*language_model\.layers\.\d+\.({'|'.join(TARGETS)})\.({names})_proj",
    }
    weights = {}
    for name, adapter in adapters.items():
        for matrix, value in (("A", adapter.a), ("B", adapter.b)):
            key = f"base_model.model.{name}.lora_{matrix}.weight"
            weights[key] = value.detach().to(torch.float16).contiguous().cpu()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(weights, directory / "adapter_model.safetensors", metadata={"format": "pt"})
