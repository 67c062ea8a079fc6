# SPDX-License-Identifier: Apache-2.0
"""GGUF files of hybrids and of vision-language models, against transformers.

Each file is made of a checkpoint that transformers loads. Sizes and switches are random. Odd seeds are files
in F16.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from engine_graphs import Graph  # noqa: E402
from greedy_answers import TOKENS, check_greedy_answer, greedy_logits  # noqa: E402
from qwen_vl_reference import SIZES, Exported, load  # noqa: E402
from random_qwen_vl import write_random_qwen2_5_vl, write_random_qwen3_vl  # noqa: E402

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.engine_directory.config import EngineConfig  # noqa: E402
from edgellm_ros.multimodal.image_processor import make_image_processor  # noqa: E402
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams  # noqa: E402
from fixtures.gguf_checkpoint import round_to_half, write_mmproj, write_model  # noqa: E402
from fixtures.hybrid_checkpoints import write_nemotron_h_checkpoint  # noqa: E402
from fixtures.pixel_values import pixel_values  # noqa: E402
from fixtures.qwen3_5_checkpoint import write_whole_qwen3_5_checkpoint  # noqa: E402
from fixtures.reference_inputs import make_image  # noqa: E402

SEEDS = 3
PROMPTS = ("in the other thing", "", "go to the red box and turn left at the door " * 4)
IMAGES = tuple(make_image(*size) for size in SIZES)
TOLERANCE = 1e-3
LIMITS = {"max_input_len": 500, "max_kv_cache_capacity": 600, "max_batch_size": 1}


def write_qwen2_5_vl(directory: Path, seed: int) -> Path:
    return write_random_qwen2_5_vl(directory, seed, regular=True)


def write_qwen3_5(directory: Path, seed: int) -> Path:
    vision = {"temporal_patch_size": 2, "rope_parameters": {"rope_type": "axial", "rope_theta": 1e4}}
    return write_whole_qwen3_5_checkpoint(directory, seed, vision)


TOWERS = {
    "qwen2vl": (write_qwen2_5_vl, transformers.Qwen2_5_VLForConditionalGeneration),
    "qwen3vl": (write_random_qwen3_vl, transformers.Qwen3VLForConditionalGeneration),
    "qwen35": (write_qwen3_5, transformers.Qwen3_5ForConditionalGeneration),
}
FAMILIES = TOWERS | {"nemotron_h": (write_nemotron_h_checkpoint, transformers.NemotronHForCausalLM)}


def asked(prompt: str, images=()) -> LLMGenerationRequest:
    sampling = SamplingParams(max_tokens=TOKENS)
    return LLMGenerationRequest(prompt, images=images, sampling=sampling, logprobs=20)


def exported_files(directory: Path, architecture: str, seed: int, tower: bool) -> Exported:
    """Export the GGUF files of a random checkpoint, and load the checkpoint."""
    writer, model_class = FAMILIES[architecture]
    checkpoint, kind = round_to_half(writer(directory / "checkpoint", seed)), "F16" if seed % 2 else "F32"
    (directory / "files").mkdir()
    path = write_model(checkpoint, directory / "files/model.gguf", kind)
    if tower:
        write_mmproj(checkpoint, directory / "files/mmproj-model.gguf", kind)
    config = export(path, directory / "engine", **LIMITS)
    model = load(model_class, checkpoint)
    model.generation_config.eos_token_id = list(config.stop_token_ids)
    return Exported(checkpoint, directory / "engine", model)


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_text_model_answers_as_transformers(tmp_path, architecture, seed, runtime_device):
    """Each token has the logits that transformers computes from the text before it."""
    exported = exported_files(tmp_path, architecture, seed, tower=False)
    with LLMInferenceRuntime(exported.engine, runtime_device, prefix_cache_bytes=0) as runtime:
        for prompt in PROMPTS:
            found = runtime.handle_request(asked(prompt))
            ids = runtime.base_model_input_token_ids[0]
            stops = exported.model.generation_config.eos_token_id
            logits = greedy_logits(exported.model, ids, found.token_ids, TOKENS, stops)
            assert logits.abs().max() > 0.5
            for entries, row in zip(found.logprobs, logits.double().log_softmax(-1), strict=True):
                tokens, values = zip(*entries, strict=True)
                np.testing.assert_allclose(values, row[list(tokens)], atol=TOLERANCE, rtol=0)


@pytest.fixture(
    scope="module",
    params=[(architecture, seed) for architecture in TOWERS for seed in range(SEEDS)],
    ids=lambda case: "-".join(map(str, case)),
)
def whole(request, tmp_path_factory) -> Exported:
    architecture, seed = request.param
    return exported_files(tmp_path_factory.mktemp(architecture), architecture, seed, tower=True)


def test_rows_of_the_tower_match(whole):
    processor = make_image_processor(EngineConfig.load(whole.engine).vision)
    graph = Graph(whole.engine / "visual" / "model.onnx")
    for image, size in zip(IMAGES, SIZES, strict=True):
        inputs = whole.inputs([], [image])
        pixels, grid = inputs["pixel_values"], inputs["image_grid_thw"]
        expected = whole.model.model.get_image_features(pixels, grid, return_dict=True)
        found = graph(
            pixel_values=pixel_values(processor, image), **processor.grid_inputs(processor.token_grid(*size))
        )
        levels = getattr(expected, "deepstack_features", None) or []
        rows = [expected.pooler_output[0], *(level[0] for level in levels)]
        assert len(rows) == len(graph.outputs)
        for name, wanted in zip(graph.outputs, rows, strict=True):
            assert wanted.std() > 0.02
            np.testing.assert_allclose(found[name], wanted, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("images", [(), IMAGES], ids=len)
def test_answers_about_images_match(whole, images, runtime_device):
    with LLMInferenceRuntime(whole.engine, runtime_device, prefix_cache_bytes=0) as runtime:
        found = runtime.handle_request(asked("go there", images))
        inputs = whole.inputs(runtime.base_model_input_token_ids[0], images)
    check_greedy_answer(found, whole.model, inputs)
