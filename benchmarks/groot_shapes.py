# SPDX-License-Identifier: Apache-2.0
"""Sizes of GR00T N1.7, and checkpoints of GR00T with random weights.

`head_shapes` and `decoder_shapes` are those of N1.6 too.

Sources of the numbers: LeRobot 0.6.1, policies/groot/groot_n1_7.py, which has the configuration of the
published checkpoint and of its Qwen3-VL. The module needs no PyTorch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.model_shapes import Shapes
from benchmarks.random_checkpoint import make_tokenizer, write_shards

ROBOT = "new_embodiment"
HEAD = "action_head"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
)
SPECIAL = {
    "<|im_start|>": 151644,
    "<|im_end|>": 151645,
    "<|vision_start|>": 151652,
    "<|vision_end|>": 151653,
    "<|image_pad|>": 151655,
}
VLM: dict[str, Any] = {  # Cosmos-Reason2-2B
    "model_type": "qwen3_vl",
    "image_token_id": SPECIAL["<|image_pad|>"],
    "text_config": {
        "model_type": "qwen3_vl_text",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000,
        "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]},
        "vocab_size": 151936,
    },
    "vision_config": {
        "model_type": "qwen3_vl",
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [5, 11, 17],
        "hidden_act": "gelu_pytorch_tanh",
        "in_channels": 3,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
    },
}
MODEL: dict[str, Any] = {
    "model_type": "Gr00tN1d7",
    "model_name": "nvidia/Cosmos-Reason2-2B",
    "backbone_model_type": "qwen",
    "backbone_embedding_dim": 2048,
    "select_layer": 16,
    "max_state_dim": 132,
    "max_action_dim": 132,
    "action_horizon": 40,
    "hidden_size": 1024,
    "input_embedding_dim": 1536,
    "max_seq_len": 1024,
    "max_num_embodiments": 32,
    "attend_text_every_n_blocks": 2,
    "diffusion_model_cfg": {
        "positional_embeddings": None,
        "num_layers": 32,
        "num_attention_heads": 32,
        "attention_head_dim": 48,
        "norm_type": "ada_norm",
        "output_dim": 1024,
        "interleave_self_attention": True,
    },
    "vl_self_attention_cfg": {
        "positional_embeddings": None,
        "num_layers": 4,
        "num_attention_heads": 32,
        "attention_head_dim": 64,
    },
    "num_inference_timesteps": 4,
    "num_timestep_buckets": 1000,
}


def groot_shapes(model: Mapping[str, Any], vlm: Mapping[str, Any]) -> Shapes:
    """Return the shape of each tensor of a checkpoint with these configurations."""
    return _backbone(model, vlm) | head_shapes(model)


def _backbone(model: Mapping[str, Any], vlm: Mapping[str, Any]) -> Shapes:
    vision, prefix = vlm["vision_config"], "backbone.model.model"
    shapes = decoder_shapes(vlm["text_config"], f"{prefix}.language_model", model["select_layer"])
    wide, raised = vision["hidden_size"], vision["intermediate_size"]
    merged, patch = wide * vision["spatial_merge_size"] ** 2, vision["patch_size"]
    tower, linears, norms = f"{prefix}.visual", {}, {}
    shapes[f"{tower}.pos_embed.weight"] = (vision["num_position_embeddings"], wide)
    kernel = (wide, vision["in_channels"], vision["temporal_patch_size"], patch, patch)
    shapes |= {f"{tower}.patch_embed.proj.weight": kernel, f"{tower}.patch_embed.proj.bias": (wide,)}
    for i in range(vision["depth"]):
        block = f"{tower}.blocks.{i}"
        norms |= {f"{block}.norm1": wide, f"{block}.norm2": wide}
        linears |= {f"{block}.attn.qkv": (3 * wide, wide), f"{block}.attn.proj": (wide, wide)}
        linears |= {f"{block}.mlp.linear_fc1": (raised, wide), f"{block}.mlp.linear_fc2": (wide, raised)}
    mergers = {f"{tower}.merger": wide}
    mergers |= {
        f"{tower}.deepstack_merger_list.{i}": merged for i in range(len(vision["deepstack_visual_indexes"]))
    }
    for module, normed in mergers.items():
        norms[f"{module}.norm"] = normed
        linears[f"{module}.linear_fc1"] = (merged, merged)
        linears[f"{module}.linear_fc2"] = (vision["out_hidden_size"], merged)
    return shapes | affine_shapes(linears, norms)


def decoder_shapes(text: Mapping[str, Any], prefix: str, layers: int) -> Shapes:
    """Return the shapes of a Qwen3 with this number of layers."""
    hidden, inner, size = text["hidden_size"], text["intermediate_size"], text["head_dim"]
    queries, keys = (text[f"num_{kind}_heads"] * size for kind in ("attention", "key_value"))
    shapes: Shapes = {f"{prefix}.embed_tokens.weight": (text["vocab_size"], hidden)}
    for i in range(layers):
        layer = f"{prefix}.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (queries, hidden),
            f"{layer}.self_attn.k_proj.weight": (keys, hidden),
            f"{layer}.self_attn.v_proj.weight": (keys, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, queries),
            f"{layer}.self_attn.q_norm.weight": (size,),
            f"{layer}.self_attn.k_norm.weight": (size,),
            f"{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"{layer}.mlp.up_proj.weight": (inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
        }
    return {**shapes, f"{prefix}.norm.weight": (hidden,)}


def head_shapes(model: Mapping[str, Any]) -> Shapes:
    """Return the shapes of the action head."""
    dit, vl = model["diffusion_model_cfg"], model.get("vl_self_attention_cfg", {"num_layers": 0})
    width, inner = dit["num_attention_heads"] * dit["attention_head_dim"], model["hidden_size"]
    hidden, robots = model["backbone_embedding_dim"], model["max_num_embodiments"]
    linears = {
        "model.timestep_encoder.timestep_embedder.linear_1": (width, 256),
        "model.timestep_encoder.timestep_embedder.linear_2": (width, width),
        "model.proj_out_1": (2 * width, width),
        "model.proj_out_2": (inner, width),
    }
    norms = {"vlln": hidden}
    for i in range(dit["num_layers"]):
        block, keys = f"model.transformer_blocks.{i}", width if i % 2 else hidden
        linears |= {**_block(block, width, keys), f"{block}.norm1.linear": (2 * width, width)}
    for i in range(vl["num_layers"]):
        block = f"vl_self_attention.transformer_blocks.{i}"
        linears |= _block(block, hidden, hidden)
        norms |= {f"{block}.norm1": hidden, f"{block}.norm3": hidden}
    own = {
        "state_encoder.layer1": (model["max_state_dim"], inner),
        "state_encoder.layer2": (inner, width),
        "action_encoder.W1": (model["max_action_dim"], width),
        "action_encoder.W2": (2 * width, width),
        "action_encoder.W3": (width, width),
        "action_decoder.layer1": (inner, inner),
        "action_decoder.layer2": (inner, model["max_action_dim"]),
    }
    shapes = {"position_embedding.weight": (model["max_seq_len"], width), **affine_shapes(linears, norms)}
    for name, (fan_in, fan_out) in own.items():
        shapes |= {f"{name}.W": (robots, fan_in, fan_out), f"{name}.b": (robots, fan_out)}
    return {f"{HEAD}.{name}": shape for name, shape in shapes.items()}


def _block(block: str, width: int, keys: int) -> dict[str, tuple[int, int]]:
    return {
        f"{block}.attn1.to_q": (width, width),
        f"{block}.attn1.to_k": (width, keys),
        f"{block}.attn1.to_v": (width, keys),
        f"{block}.attn1.to_out.0": (width, width),
        f"{block}.ff.net.0.proj": (4 * width, width),
        f"{block}.ff.net.2": (width, 4 * width),
    }


def affine_shapes(linears: Mapping[str, tuple[int, int]], norms: Mapping[str, int]) -> Shapes:
    """Return the shapes of weights and biases of linear layers and norms."""
    shapes: Shapes = {}
    for name, shape in (*linears.items(), *((name, (size,)) for name, size in norms.items())):
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return shapes


def small(layers: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the configurations with fewer layers of each kind."""
    text = {**VLM["text_config"], "num_hidden_layers": layers + 3}
    vision = {**VLM["vision_config"], "depth": layers, "deepstack_visual_indexes": [0]}
    model = {**MODEL, "select_layer": layers + 1}
    model["diffusion_model_cfg"] = {**MODEL["diffusion_model_cfg"], "num_layers": 2 * layers}
    model["vl_self_attention_cfg"] = {**MODEL["vl_self_attention_cfg"], "num_layers": 1}
    return model, {**VLM, "text_config": text, "vision_config": vision}


def write_vlm(folder: Path, vlm: Mapping[str, Any]) -> None:
    """Write the files of the vision language model without weights."""
    make_tokenizer(vlm["text_config"]["vocab_size"], SPECIAL).save(
        str(folder / "tokenizer.json"), pretty=False
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    vision = vlm["vision_config"]
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "patch_size": vision["patch_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


@dataclass(frozen=True)
class Version:
    """A version of GR00T, with the sizes of the published checkpoint."""

    model: Mapping[str, Any]  # its configuration
    vlm: Mapping[str, Any]  # that of its vision language model
    shapes: Callable[[Mapping[str, Any], Mapping[str, Any]], Shapes]  # of the tensors with both of these
    small: Callable[[int], tuple[dict[str, Any], dict[str, Any]]]  # both with fewer layers of each kind
    write_vlm: Callable[[Path, Mapping[str, Any]], None]  # the files of the vision language model


N1_7 = Version(MODEL, VLM, groot_shapes, small, write_vlm)


def write_groot_checkpoint(
    directory: Path, version: Version, model: Mapping[str, Any], vlm: Mapping[str, Any], cameras: int
) -> Path:
    """Write a checkpoint in NVIDIA's layout, and return the directory.

    Weights are bf16, as the published ones.
    """
    folder = directory / "vlm"
    folder.mkdir(parents=True)
    version.write_vlm(folder, vlm)
    keys = {"arm": 7, "gripper": 1}
    modality = {"delta_indices": [0], "modality_keys": [*keys]}
    robot = {
        "video": {**modality, "modality_keys": [f"camera_{i}" for i in range(cameras)]},
        "state": modality,
        "action": {**modality, "delta_indices": [*range(model["action_horizon"])]},
    }
    settings = {
        "modality_configs": {ROBOT: robot},
        "use_albumentations": True,
        "letter_box_transform": True,  # so that an image is a square
        "shortest_image_edge": 256,
        "crop_fraction": 0.95,
        "image_target_size": [256, 256],
    }
    ranges = {key: {"min": [-1.0] * size, "max": [1.0] * size} for key, size in keys.items()}
    files = {
        "vlm/config.json": vlm,
        "processor_config.json": {"processor_kwargs": settings},
        "statistics.json": {ROBOT: {"state": ranges, "action": ranges}},
        "embodiment_id.json": {ROBOT: 10},
        "config.json": model,
    }
    for name, contents in files.items():
        (directory / name).write_text(json.dumps(contents))
    shapes = version.shapes(model, vlm)
    names = [*shapes]
    parts = [{name: shapes[name] for name in names[i::4]} for i in range(4)]
    write_shards(directory, parts, "bf16", seed=0)
    return directory
