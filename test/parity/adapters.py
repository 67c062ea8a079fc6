# SPDX-License-Identifier: Apache-2.0
"""Adapters of random weights to compare with PEFT, and the prompt they answer."""

from __future__ import annotations

from pathlib import Path

from fixtures.tiny_adapter import write_adapter

PROMPT = "What do you see?"
MAX_TOKENS = 24
LOGPROBS = 5
MAX_RANK = 16

ADAPTERS = {
    "rank 1": {"r": 1, "lora_alpha": 1},
    "rank 16": {"r": 16, "lora_alpha": 32},
    "rslora": {"r": 4, "lora_alpha": 3, "use_rslora": True},
    "attention": {"r": 8, "modules": ("q_proj", "v_proj")},
    "patterns": {
        "r": 4,
        "lora_alpha": 7,
        "rank_pattern": {"down_proj": 2, r"layers\.\d+\.self_attn\.k_proj": 6},
        "ranks": {"down_proj": 2, "k_proj": 6},
        "alpha_pattern": {"mlp.up_proj": 1, r"layers\.1\.self_attn\.q_proj": 20},
    },
}


def write_adapters(directory: Path, checkpoint: Path) -> dict[str, Path]:
    """All of them, by name."""
    return {
        name: write_adapter(directory / f"adapter{seed}", checkpoint, seed=seed, **arguments)
        for seed, (name, arguments) in enumerate(ADAPTERS.items())
    }
