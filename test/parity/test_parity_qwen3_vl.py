# SPDX-License-Identifier: Apache-2.0
"""Qwen3-VL checkpoints and whole Qwen3-Omni ones against transformers.

The Qwen3-VL checkpoints have random sizes and switches.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.parity
pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from greedy_answers import TOKENS  # noqa: E402
from qwen_vl_reference import PROMPTS, check_answer, export_beside, save_random_weights  # noqa: E402
from video_reference import check_videos, write_video_processor  # noqa: E402

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams  # noqa: E402
from fixtures.qwen3_vl_checkpoint import write_qwen3_vl_checkpoint, write_whole_omni_checkpoint  # noqa: E402
from fixtures.reference_inputs import make_image  # noqa: E402
from fixtures.tiny_checkpoint import write_json, write_tiny_checkpoint  # noqa: E402


def write_random_checkpoint(directory: Path, seed: int) -> Path:
    """Write a checkpoint of transformers' own making, with random sizes and weights."""
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


@pytest.fixture(scope="module", params=[*range(8), "fixture", "tied fixture"])
def exported(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen3_vl") / "checkpoint"
    if isinstance(request.param, int):
        write_random_checkpoint(directory, request.param)
    else:
        write_qwen3_vl_checkpoint(directory, tied=request.param == "tied fixture")
    return export_beside(directory, transformers.Qwen3VLForConditionalGeneration)


@pytest.mark.parametrize("sizes", PROMPTS, ids=len)
def test_positions_greedy_tokens_and_log_probabilities_match(exported, sizes, runtime_device):
    check_answer(exported, runtime_device, sizes)


def test_videos_match(exported, runtime_device):
    check_videos(exported, runtime_device)


def test_the_thinker_of_a_whole_omni_checkpoint_is_the_thinker_alone(tmp_path):
    whole = write_whole_omni_checkpoint(tmp_path / "whole")
    alone = write_tiny_checkpoint(tmp_path / "alone", action_expert=False)
    _, info = transformers.Qwen3OmniMoeForConditionalGeneration.from_pretrained(
        whole, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    request = LLMGenerationRequest(
        "go", images=(make_image(48, 64),), sampling=SamplingParams(max_tokens=TOKENS), logprobs=3
    )
    answers = []
    for checkpoint in (whole, alone):
        export(checkpoint, checkpoint / "engine")
        with LLMInferenceRuntime(checkpoint / "engine") as runtime:
            answers.append(runtime.handle_request(request))
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].logprobs == answers[1].logprobs
