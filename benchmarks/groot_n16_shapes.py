# SPDX-License-Identifier: Apache-2.0
"""Sizes of GR00T N1.6.

Sources of the numbers: NVIDIA Isaac-GR00T, branch n1.6-release, gr00t/configs/model/gr00t_n1d6.py and
Eagle-Block2A-2B-v2/config.json; actions and state of the published checkpoint have 128 values. The module
needs no PyTorch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import groot_shapes
from benchmarks.groot_shapes import Version, affine_shapes, decoder_shapes, head_shapes
from benchmarks.model_shapes import Shapes
from benchmarks.random_checkpoint import make_tokenizer

BACKBONE = "backbone.model"
SPECIAL = {
    "<|im_start|>": 151644,
    "<|im_end|>": 151645,
    "<IMG_CONTEXT>": 151669,
    "<img>": 151670,
    "</img>": 151671,
}
TEMPLATE = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
    "{% set images = namespace(count=0) %}{% for part in messages[0].content %}"
    "{% if part.type == 'image' %}{% set images.count = images.count + 1 %}<image-{{ images.count }}>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n"
)
EAGLE: dict[str, Any] = {
    "model_type": "eagle_3_vl",
    "downsample_ratio": 0.5,
    "image_token_index": SPECIAL["<IMG_CONTEXT>"],
    "select_layer": -1,
    "text_config": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "vocab_size": 151680,
    },
    "vision_config": {
        "model_type": "siglip2_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_patches": 256,
        "patch_size": 14,
        "use_rope": False,
        "use_windows_attn": False,
    },
}
MODEL: dict[str, Any] = {
    **{key: value for key, value in groot_shapes.MODEL.items() if key != "vl_self_attention_cfg"},
    "model_type": "Gr00tN1d6",
    "model_name": "nvidia/Eagle-Block2A-2B-v2",
    "backbone_model_type": "eagle",
    "max_state_dim": 128,
    "max_action_dim": 128,
    "action_horizon": 50,
}


def eagle_shapes(model: Mapping[str, Any], eagle: Mapping[str, Any]) -> Shapes:
    """Return the shape of each tensor of a GR00T N1.6 with these configurations."""
    text, vision = eagle["text_config"], eagle["vision_config"]
    decoder = decoder_shapes(text, f"{BACKBONE}.language_model.model", model["select_layer"])
    return decoder | _tower(vision) | _connector(eagle) | head_shapes(model)


def _tower(vision: Mapping[str, Any]) -> Shapes:
    wide, raised, tower = (
        vision["hidden_size"],
        vision["intermediate_size"],
        f"{BACKBONE}.vision_model.vision_model",
    )
    linears = {f"{tower}.embeddings.patch_embedding": (wide, 3 * vision["patch_size"] ** 2)}
    norms = {f"{tower}.post_layernorm": wide}
    for i in range(vision["num_hidden_layers"]):
        layer = f"{tower}.encoder.layers.{i}"
        attention = (f"{layer}.self_attn.{name}_proj" for name in ("q", "k", "v", "out"))
        linears |= {name: (wide, wide) for name in attention}
        linears |= {f"{layer}.mlp.fc1": (raised, wide), f"{layer}.mlp.fc2": (wide, raised)}
        norms |= {f"{layer}.layer_norm1": wide, f"{layer}.layer_norm2": wide}
    positions = f"{tower}.embeddings.position_embedding.weight"
    return {positions: (vision["num_patches"], wide), **affine_shapes(linears, norms)}


def _connector(eagle: Mapping[str, Any]) -> Shapes:
    hidden = eagle["text_config"]["hidden_size"]
    merged = eagle["vision_config"]["hidden_size"] * round(1 / eagle["downsample_ratio"]) ** 2
    linears = {f"{BACKBONE}.mlp1.1": (hidden, merged), f"{BACKBONE}.mlp1.3": (hidden, hidden)}
    return affine_shapes(linears, {f"{BACKBONE}.mlp1.0": merged})


def small(layers: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the configurations with fewer layers of each kind."""
    text = {**EAGLE["text_config"], "num_hidden_layers": layers + 1}
    vision = {**EAGLE["vision_config"], "num_hidden_layers": layers}
    dit = {**MODEL["diffusion_model_cfg"], "num_layers": 2 * layers}
    model = {**MODEL, "select_layer": layers, "diffusion_model_cfg": dit}
    return model, {**EAGLE, "text_config": text, "vision_config": vision}


def write_eagle(folder: Path, eagle: Mapping[str, Any]) -> None:
    """Write the files of an Eagle without weights and configuration."""
    tokenizer = make_tokenizer(eagle["text_config"]["vocab_size"], SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    half = [0.5, 0.5, 0.5]
    pixels = {"do_resize": False, "image_mean": half, "image_std": half}
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    (folder / "processor_config.json").write_text(json.dumps({"pixels_per_token": 28 * 28}))


N1_6 = Version(MODEL, EAGLE, eagle_shapes, small, write_eagle)
