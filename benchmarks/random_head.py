# SPDX-License-Identifier: Apache-2.0
"""Draft heads with random weights, for checkpoints of any size."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from benchmarks.model_shapes import ModelShape
from benchmarks.published_models import PublishedModel
from benchmarks.random_checkpoint import random_tensor
from edgellm_ros.builder.weights.weights import add_file

MTP_FILE = "mtp.safetensors"
BLOCK_SIZE, DRAFTER_LAYERS = 16, 5  # of nearly all published drafters of DFlash
DRAFT_VOCABULARY = 32000  # of nearly all published heads
LAYERS = "eagle_aux_hidden_state_layer_ids"


def write_head(directory: Path, shape: ModelShape, precision: str, seed: int = 1) -> Path:
    """Write a head with the proportions of published ones; return its directory.

    The head has one layer with the sizes of the base's layers, and 32,000 logits, or as many as the base if
    these are fewer. It is written again only for another shape, precision or seed.
    """
    config = head_config(shape) | {"random": {"precision": precision, "seed": seed}}
    if _is_written(directory, config):
        return directory
    rng = np.random.Generator(np.random.SFC64(seed))
    base, vocabulary = {"hidden_size": shape.hidden_size}, config["draft_vocab_size"]
    tensors = {
        name: random_tensor(rng, name, size, precision)
        for name, size in head_shapes(config, base, vocabulary).items()
    }
    chosen = np.sort(rng.permutation(shape.vocab_size - 1)[:vocabulary])  # without the stop token
    tensors["d2t"] = chosen - np.arange(vocabulary)
    return _write(directory, config, tensors)


def add_mtp_head(checkpoint: Path, model: PublishedModel, precision: str, seed: int = 1) -> None:
    """Add an MTP head to a Qwen3.5 of `write_checkpoint` that has none."""
    if (checkpoint / MTP_FILE).is_file():
        return
    if model.model_type != "qwen3_5":
        raise ValueError(f"no layout of an MTP head for {model.model_type!r}, expected qwen3_5")
    rng = np.random.Generator(np.random.SFC64(seed))
    tensors = {
        f"mtp.{name}": random_tensor(rng, name, size, precision)
        for name, size in mtp_shapes(model.text).items()
    }
    save_file(tensors, checkpoint / MTP_FILE)
    add_file(checkpoint, MTP_FILE, tensors)


def write_block_drafter(
    directory: Path, model: ModelShape | PublishedModel, precision: str, seed: int = 1
) -> Path:
    """Write a DFlash drafter as large as published ones; return its directory.

    The drafter has 5 layers with the sizes of the base's attention layers, and blocks of 16 tokens. It is
    written again only for another shape, precision or seed.
    """
    text = model.text if isinstance(model, PublishedModel) else asdict(model)
    same = ("hidden_size", "intermediate_size", "vocab_size")
    same += ("num_attention_heads", "num_key_value_heads", "head_dim")
    layers = text["num_hidden_layers"]
    states = min(DRAFTER_LAYERS, layers)
    config = {
        "architectures": ["DFlashDraftModel"],
        "block_size": BLOCK_SIZE,
        "dflash_config": {
            "mask_token_id": text["vocab_size"] - 1,
            "target_layer_ids": [i * layers // states for i in range(states)],
        },
        "hidden_act": "silu",
        "num_hidden_layers": DRAFTER_LAYERS,
        "num_target_layers": layers,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        **{key: text[key] for key in same},
        "random": {"precision": precision, "seed": seed},
    }
    if _is_written(directory, config):
        return directory
    rng = np.random.Generator(np.random.SFC64(seed))
    shapes = drafter_shapes(config, states)
    tensors = {name: random_tensor(rng, name, size, precision) for name, size in shapes.items()}
    return _write(directory, config, tensors)


def _is_written(directory: Path, config: Mapping[str, Any]) -> bool:
    """Tell whether a head with this configuration is in a directory already."""
    file = directory / "config.json"
    return file.is_file() and json.loads(file.read_text()) == config


def _write(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    """Write a head into a directory in place of another; return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "config.json"
    file.unlink(missing_ok=True)
    save_file(dict(tensors), directory / "model.safetensors")
    file.write_text(json.dumps(config))  # last: an interrupted head has no config
    return directory


def drafter_shapes(config: Mapping[str, Any], states: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a DFlash drafter's tensors.

    states: number of the base's states.
    """
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    layer: dict[str, tuple[int, ...]] = {
        **{f"{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")},
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        **{f"self_attn.{name}_norm.weight": (size,) for name in "qk"},
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, states * hidden)}
    shapes |= {f"{norm}.weight": (hidden,) for norm in ("hidden_norm", "norm")}
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"layers.{i}.{name}": size for name, size in layer.items()}
    return shapes


def mtp_shapes(text: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return names after `mtp.` and shapes of all tensors of a Qwen3.5's head."""
    hidden, inner, size = text["hidden_size"], text["intermediate_size"], text["head_dim"]
    q, kv, layer = text["num_attention_heads"] * size, text["num_key_value_heads"] * size, "layers.0."
    return {
        "fc.weight": (hidden, 2 * hidden),
        **{f"{norm}.weight": (hidden,) for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")},
        **{f"{layer}{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")},
        f"{layer}self_attn.q_proj.weight": (2 * q, hidden),  # with gates
        f"{layer}self_attn.k_proj.weight": (kv, hidden),
        f"{layer}self_attn.v_proj.weight": (kv, hidden),
        f"{layer}self_attn.o_proj.weight": (hidden, q),
        f"{layer}self_attn.q_norm.weight": (size,),
        f"{layer}self_attn.k_norm.weight": (size,),
        f"{layer}mlp.gate_proj.weight": (inner, hidden),
        f"{layer}mlp.up_proj.weight": (inner, hidden),
        f"{layer}mlp.down_proj.weight": (hidden, inner),
    }


def head_config(shape: ModelShape) -> dict[str, Any]:
    """Make `config.json` of a head for a text model.

    ValueError for fewer than 3 layers.
    """
    layers = shape.num_hidden_layers
    states = (2, layers // 2, layers - 3)
    if not states[0] < states[1] < states[2]:  # fewer than 7 layers
        if layers < 3:
            raise ValueError(f"a head takes the states of three layers, the language model has {layers}")
        states = (layers - 2, layers - 1, layers)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_parameters["rope_theta"],
        "max_position_embeddings": 40960,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": min(DRAFT_VOCABULARY, shape.vocab_size - 1),
        LAYERS: [layer - 1 for layer in states],  # counted as outputs
    }


def head_shapes(
    text: Mapping[str, Any],
    base: Mapping[str, Any],
    vocabulary: int | None,
    fc_bias: bool = False,
    fc_norm: bool = False,
    input_norm: bool = False,
    head_norms: bool = False,
    biases: tuple[str, ...] = (),
) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of all floats of a head, as EAGLE names them.

    text: the config of its layers; base: that of the language model. vocabulary: logits of its LM head, None
    = it has none. biases: names of linear layers that have one.
    """
    hidden, inner, size, wide = (
        text["hidden_size"],
        text["intermediate_size"],
        text["head_dim"],
        base["hidden_size"],
    )
    q, kv = text["num_attention_heads"] * size, text["num_key_value_heads"] * size
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 3 * wide), "norm.weight": (hidden,)}
    shapes |= {"fc.bias": (hidden,)} if fc_bias else {}
    shapes |= {f"fc_norm.{i}.weight": (wide,) for i in range(3)} if fc_norm else {}
    shapes |= {"input_norm.weight": (3 * wide,)} if input_norm else {}
    shapes |= {"lm_head.weight": (vocabulary, hidden)} if vocabulary is not None else {}
    for i in range(text["num_hidden_layers"]):
        taken = hidden if i else 2 * hidden
        linears = {
            "self_attn.q_proj": (q, taken),
            "self_attn.k_proj": (kv, taken),
            "self_attn.v_proj": (kv, taken),
            "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        layer: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in linears.items()}
        biased = {name: shape for name, shape in linears.items() if name.split(".")[1] in biases}
        layer |= {f"{name}.bias": shape[:1] for name, shape in biased.items()}
        layer |= {f"{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        layer |= {} if i else {"hidden_norm.weight": (hidden,)}
        layer |= {f"self_attn.{name}_norm.weight": (size,) for name in "qk"} if head_norms else {}
        module = f"layers.{i}" if i else "midlayer"
        shapes |= {f"{module}.{name}": shape for name, shape in layer.items()}
    return shapes
