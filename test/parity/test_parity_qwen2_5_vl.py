# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-VL checkpoints with random sizes and switches, against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

pytestmark = pytest.mark.parity
pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from qwen_vl_reference import PROMPTS, check_answer, export_beside, save_random_weights  # noqa: E402
from video_reference import check_videos, write_video_processor  # noqa: E402

from fixtures.qwen3_vl_checkpoint import write_qwen3_vl_checkpoint  # noqa: E402
from fixtures.tiny_checkpoint import write_json  # noqa: E402


def write_random_checkpoint(directory: Path, seed: int) -> Path:
    """Write a checkpoint of transformers' own making, with random sizes and weights."""
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


def write_older_form(directory: Path) -> None:
    """Give a checkpoint the keys and names of tensors of transformers before 4.52."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    text = config.pop("text_config")
    config = text | config
    rope = text["rope_parameters"]
    del config["rope_parameters"]
    config |= {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    write_json(path, config)
    tensors = load_file(directory / "model.safetensors")
    renamed = {
        name.replace("model.visual.", "visual.").replace("model.language_model.", "model."): tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module", params=range(9))
def exported(request, tmp_path_factory):
    directory = write_random_checkpoint(tmp_path_factory.mktemp("qwen2_5_vl") / "checkpoint", request.param)
    if request.param % 3 == 2:
        write_older_form(directory)
    return export_beside(directory, transformers.Qwen2_5_VLForConditionalGeneration)


@pytest.mark.parametrize("sizes", PROMPTS, ids=len)
def test_positions_greedy_tokens_and_log_probabilities_match(exported, sizes, runtime_device):
    check_answer(exported, runtime_device, sizes)


def test_videos_match(exported, runtime_device):
    check_videos(exported, runtime_device)
