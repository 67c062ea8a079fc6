# SPDX-License-Identifier: Apache-2.0
"""Qwen3-VL checkpoints with random sizes and switches, and whole Qwen3-Omni ones, against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil  # noqa: E402

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from edgellm_ros.runtime.prompt.rope import get_rope_index  # noqa: E402
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams  # noqa: E402
from fixtures.qwen3_vl_checkpoint import write_qwen3_vl_checkpoint, write_whole_omni_checkpoint  # noqa: E402
from fixtures.reference_inputs import make_image  # noqa: E402
from fixtures.tiny_checkpoint import write_json, write_tiny_checkpoint  # noqa: E402

TOLERANCE = 1e-3
SIZES = [(48, 64), (131, 33), (20, 150)]
TOKENS = 32


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
    torch.manual_seed(seed)
    model = transformers.Qwen3VLForConditionalGeneration(
        transformers.AutoConfig.from_pretrained(directory)
    ).requires_grad_(False)
    for value in model.parameters():
        if value.dim() > 1:
            value.normal_(0, np.prod(value.shape[1:]) ** -0.5)
        else:
            value.normal_(0, 0.2).add_(value.dim() and 0.5)
    model.get_input_embeddings().weight.normal_(0, 1)
    generation = (directory / "generation_config.json").read_text()
    model.save_pretrained(directory)
    (directory / "generation_config.json").write_text(generation)
    return directory


@pytest.fixture(scope="module", params=[*range(8), "fixture", "tied fixture"])
def checkpoint(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen3_vl") / "checkpoint"
    if isinstance(request.param, int):
        return write_random_checkpoint(directory, request.param)
    return write_qwen3_vl_checkpoint(directory, tied=request.param == "tied fixture")


@pytest.fixture(scope="module")
def engine(checkpoint, tmp_path_factory):
    directory = tmp_path_factory.mktemp("engine")
    export(checkpoint, directory)
    return directory


@pytest.fixture(scope="module")
def model(checkpoint):
    loaded, info = transformers.Qwen3VLForConditionalGeneration.from_pretrained(
        checkpoint, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return loaded.eval().requires_grad_(False)


@pytest.mark.parametrize("sizes", [[], SIZES[:1], SIZES], ids=len)
def test_positions_greedy_tokens_and_log_probabilities_match(
    checkpoint, engine, model, sizes, runtime_device
):
    images = tuple(make_image(*size) for size in sizes)
    request = LLMGenerationRequest(
        "go there", images=images, sampling=SamplingParams(max_tokens=TOKENS), logprobs=5
    )
    with LLMInferenceRuntime(engine, runtime_device) as runtime:
        found = runtime.handle_request(request)
        ids = runtime.base_model_input_token_ids
    inputs = {"input_ids": torch.tensor(ids)}
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == model.config.image_token_id).int()
    grids = []
    if images:
        processor = Qwen2VLImageProcessorPil.from_pretrained(checkpoint)
        inputs |= processor(list(images), return_tensors="pt")
        grids = (inputs["image_grid_thw"][:, 1:] // model.config.vision_config.spatial_merge_size).tolist()
    special = model.config.image_token_id, model.config.vision_start_token_id
    positions, delta = get_rope_index(ids[0], [tuple(grid) for grid in grids], *special)
    expected, expected_delta = model.model.get_rope_index(
        inputs["input_ids"], inputs["mm_token_type_ids"], inputs.get("image_grid_thw")
    )
    np.testing.assert_array_equal(positions, expected[:, 0])
    assert delta == int(expected_delta)
    answer = model.generate(
        **inputs,
        max_new_tokens=TOKENS,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.cat(answer.logits)
    assert found.token_ids == answer.sequences[0, len(ids[0]) :].tolist()
    assert logits.abs().max() > 0.5
    for entries, row in zip(found.logprobs, logits.double().log_softmax(-1), strict=True):
        tokens, values = zip(*entries, strict=True)
        np.testing.assert_allclose(values, row[list(tokens)], atol=TOLERANCE, rtol=0)


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
