# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters with random weights, as PEFT saves them; needs no PyTorch."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

PREFIX = "base_model.model.model.language_model."  # of a thinker in transformers 5
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def module_shapes(text_config: dict) -> dict[str, tuple[int, int]]:
    """Fan in and fan out of the linear layers of a decoder, by their names in it ("layers.0.mlp.up_proj")."""
    hidden, inner = text_config["hidden_size"], text_config["intermediate_size"]
    q = text_config["num_attention_heads"] * text_config["head_dim"]
    kv = text_config["num_key_value_heads"] * text_config["head_dim"]
    attention = [(hidden, q), (hidden, kv), (hidden, kv), (q, hidden)]
    shapes = dict(zip(MODULES, [*attention, (hidden, inner), (hidden, inner), (inner, hidden)], strict=True))
    return {
        f"layers.{i}.{'mlp' if name in MODULES[4:] else 'self_attn'}.{name}": shapes[name]
        for i in range(text_config["num_hidden_layers"])
        for name in MODULES
    }


def write_adapter(
    directory: Path,
    checkpoint: Path,
    seed: int = 0,
    modules: tuple[str, ...] = MODULES,
    prefix: str = PREFIX,
    ranks: dict[str, int] | None = None,
    strength: float = 0.5,
    dtype: type = np.float32,
    **config: object,
) -> Path:
    """Write an adapter for a checkpoint and return its directory.

    ranks: of modules whose rank is not the config's r, by the last part of their name. strength: how large
    the change of a layer's output is beside the output itself. Other keywords go into adapter_config.json.
    """
    text = json.loads((checkpoint / "config.json").read_text())["text_config"]
    wrapped = re.escape(prefix.removeprefix("base_model.model."))
    data = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "target_modules": rf"{wrapped}layers\.\d+\.(self_attn|mlp)\.({'|'.join(modules)})",
        **config,
    }
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, (fan_in, fan_out) in module_shapes(text).items():
        kind = name.rpartition(".")[2]
        if kind not in modules:
            continue
        rank = (ranks or {}).get(kind, data["r"])
        a, b = rng.standard_normal((rank, fan_in)), rng.standard_normal((fan_out, rank))
        scaling = data["lora_alpha"] / (rank**0.5 if data["use_rslora"] else rank)
        tensors[f"{prefix}{name}.lora_A.weight"] = (a * fan_in**-0.5).astype(dtype)
        tensors[f"{prefix}{name}.lora_B.weight"] = (b * strength * rank**-0.5 / scaling).astype(dtype)
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text(json.dumps(data))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory
