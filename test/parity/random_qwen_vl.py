# SPDX-License-Identifier: Apache-2.0
"""Random checkpoints of Qwen2.5-VL and Qwen3-VL, saved by transformers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import transformers
from qwen_vl_reference import save_random_weights
from video_reference import write_video_processor

from fixtures.qwen3_vl_checkpoint import write_qwen3_vl_checkpoint
from fixtures.tiny_checkpoint import write_json


def write_random_qwen2_5_vl(directory: Path, seed: int, regular: bool = False) -> Path:
    """Write a Qwen2.5-VL of transformers' own making, with random sizes and weights.

    regular: blocks without windows come at regular distances.
    """
    write_qwen3_vl_checkpoint(directory)
    rng = np.random.default_rng(seed)
    config = json.loads((directory / "config.json").read_text())
    pairs, heads, kv_heads = int(rng.integers(4, 13)), int(rng.integers(1, 4)), int(rng.integers(1, 3))
    height, width = int(rng.integers(0, pairs // 2)), int(rng.integers(0, pairs // 2))
    group, depth = int(rng.integers(1, 4)), int(rng.integers(2, 6))
    hidden, patch = 2 * pairs * kv_heads * group, int(rng.integers(3, 9))
    merge, cells = int(rng.choice([1, 2, 2, 3])), int(rng.integers(1, 4))
    config["model_type"] = "qwen2_5_vl"
    config["tie_word_embeddings"] = seed % 4 == 1
    config["text_config"] |= {
        "model_type": "qwen2_5_vl_text",
        "hidden_size": hidden,
        "intermediate_size": int(rng.integers(30, 120)),
        "num_hidden_layers": int(rng.integers(2, 5)),
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": float(rng.choice([1e-6, 1e-3])),
        # transformers would write ids of Qwen's own vocabulary
        "bos_token_id": config["text_config"]["pad_token_id"],
        "eos_token_id": config["text_config"]["pad_token_id"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": float(rng.choice([1e4, 1e6])),
            "mrope_section": [pairs - height - width, height, width],
        },
    }
    del config["text_config"]["head_dim"]
    full = rng.permutation(depth)[: int(rng.integers(0, depth + 1))]
    if regular:
        every = 1 + seed % depth
        full = np.arange(every - 1, depth, every)
    config["vision_config"] = {
        "model_type": "qwen2_5_vl_vision",
        "depth": depth,
        "hidden_size": 8 * heads * int(rng.integers(1, 4)),
        "num_heads": heads,
        "intermediate_size": int(rng.integers(30, 90)),
        "out_hidden_size": hidden,
        "patch_size": patch,
        "spatial_merge_size": merge,
        "temporal_patch_size": 2,
        "window_size": patch * merge * cells + int(rng.integers(0, patch)),
        "fullatt_block_indexes": sorted(full.tolist()),
        "hidden_act": "silu",
    }
    write_json(directory / "config.json", config)
    path = directory / "preprocessor_config.json"
    area = (patch * merge) ** 2
    size = {"shortest_edge": 4 * area, "longest_edge": 30 * area}
    processor = json.loads(path.read_text())
    write_json(path, processor | {"patch_size": patch, "merge_size": merge, "size": size})
    write_video_processor(directory, seed)
    save_random_weights(transformers.Qwen2_5_VLForConditionalGeneration, directory, seed)
    return directory


def write_random_qwen3_vl(directory: Path, seed: int) -> Path:
    """Write a Qwen3-VL of transformers' own making, with random sizes and weights."""
    write_qwen3_vl_checkpoint(directory)
    rng = np.random.default_rng(seed)
    config = json.loads((directory / "config.json").read_text())
    text, vision = config["text_config"], config["vision_config"]
    head_dim, kv_heads, heads = 2 * int(rng.integers(4, 13)), int(rng.integers(1, 4)), int(rng.integers(1, 4))
    pairs = head_dim // 2
    height, width = int(rng.integers(0, pairs // 3 + 1)), int(rng.integers(0, pairs // 3 + 1))
    text |= {
        "hidden_size": 8 * int(rng.integers(3, 9)),
        "intermediate_size": int(rng.integers(30, 120)),
        "num_hidden_layers": int(rng.integers(2, 5)),
        "num_attention_heads": kv_heads * int(rng.integers(1, 4)),
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "attention_bias": bool(seed % 2),
        "rms_norm_eps": float(rng.choice([1e-6, 1e-3])),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": float(rng.choice([1e4, 5e6])),
            "mrope_section": [pairs - height - width, height, width],
            "mrope_interleaved": True,
        },
    }
    vision |= {
        "depth": int(rng.integers(2, 5)),
        "hidden_size": 8 * heads * int(rng.integers(1, 4)),
        "num_heads": heads,
        "intermediate_size": int(rng.integers(30, 90)),
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": int(rng.integers(3, 9)) ** 2,
        "patch_size": int(rng.integers(3, 10)),
        "spatial_merge_size": int(rng.choice([1, 2, 2, 3])),
    }
    levels = int(rng.integers(0, min(vision["depth"], text["num_hidden_layers"]) + 1))
    chosen = rng.permutation(vision["depth"])[:levels]
    vision["deepstack_visual_indexes"] = sorted(chosen.tolist())
    config["tie_word_embeddings"] = seed % 4 == 1
    processor = json.loads((directory / "preprocessor_config.json").read_text())
    processor |= {"patch_size": vision["patch_size"], "merge_size": vision["spatial_merge_size"]}
    area = (vision["patch_size"] * vision["spatial_merge_size"]) ** 2
    processor["size"] = {"shortest_edge": 4 * area, "longest_edge": 20 * area}
    if seed % 2:  # as transformers 5 writes it
        (directory / "preprocessor_config.json").unlink()
        write_json(directory / "processor_config.json", {"image_processor": processor})
    else:
        write_json(directory / "preprocessor_config.json", processor)
    write_json(directory / "config.json", config)
    write_video_processor(directory, seed)
    save_random_weights(transformers.Qwen3VLForConditionalGeneration, directory, seed)
    return directory
