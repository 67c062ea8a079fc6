# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5 checkpoints as they are published, against transformers.

Sizes and switches are random.
"""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from engine_graphs import Graph, LanguageModel  # noqa: E402
from greedy_answers import TOLERANCE, check_greedy_answer  # noqa: E402
from qwen_vl_reference import PROMPTS, SIZES, check_answer, export_beside  # noqa: E402
from video_reference import check_videos, write_video_processor  # noqa: E402

from edgellm_ros.engine_directory.config import EngineConfig  # noqa: E402
from edgellm_ros.multimodal.image_processor import make_image_processor  # noqa: E402
from edgellm_ros.runtime.conversation import ImagePart, Message, TextPart  # noqa: E402
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams  # noqa: E402
from fixtures.draws import draws  # noqa: E402
from fixtures.pixel_values import pixel_values  # noqa: E402
from fixtures.qwen3_5_checkpoint import write_whole_qwen3_5_checkpoint  # noqa: E402
from fixtures.reference_inputs import make_image  # noqa: E402

# Five have every value of each switch, every size of a merged patch, and one to three pictures of a patch.
SEEDS = draws((0, 1, 2, 3, 6), tuple(range(8)))
IMAGES = tuple(make_image(*size) for size in SIZES)


@pytest.fixture(scope="module", params=SEEDS)
def exported(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen3_5") / "checkpoint"
    write_whole_qwen3_5_checkpoint(directory, request.param)
    write_video_processor(directory, request.param)
    limits = {"max_input_len": 500, "max_kv_cache_capacity": 600}  # a group of frames may be one frame
    return export_beside(directory, transformers.Qwen3_5ForConditionalGeneration, **limits)


@pytest.fixture(scope="module")
def prompt(exported):
    """Inputs of a prompt with three images between random words.

    The prompt is longer than a chunk of the delta net.
    """
    config, rng = exported.model.config, np.random.default_rng(0)
    patches = exported.inputs([], IMAGES)["image_grid_thw"].prod(1)
    counts = (patches // config.vision_config.spatial_merge_size**2).tolist()
    ids = rng.integers(0, 256, 20).tolist()
    for count in counts:
        image = [config.vision_start_token_id, *[config.image_token_id] * count, config.vision_end_token_id]
        ids += [*image, *rng.integers(0, 256, 20).tolist()]
    return exported.inputs(ids, IMAGES)


def tower_inputs(exported) -> list[dict[str, np.ndarray]]:
    """Make the inputs of the tower's graph for each image."""
    processor = make_image_processor(EngineConfig.load(exported.engine).vision)
    grids = [processor.token_grid(*size) for size in SIZES]
    return [
        {"pixel_values": pixel_values(processor, image), **processor.grid_inputs(grid)}
        for image, grid in zip(IMAGES, grids, strict=True)
    ]


def test_pixels_are_those_of_transformers(exported, prompt):
    found = np.concatenate([inputs["pixel_values"] for inputs in tower_inputs(exported)])
    np.testing.assert_array_equal(found, prompt["pixel_values"])


def test_rows_of_the_tower_match(exported, prompt):
    graph = Graph(exported.engine / "visual" / "model.onnx")
    assert graph.outputs == ["image_embeds"]
    pixels, grids = prompt["pixel_values"], prompt["image_grid_thw"]
    expected = exported.model.model.get_image_features(pixels, grids, return_dict=True).pooler_output
    for inputs, rows in zip(tower_inputs(exported), expected, strict=True):
        assert rows.std() > 0.05
        np.testing.assert_allclose(graph(**inputs)["image_embeds"], rows, atol=TOLERANCE, rtol=0)


def test_logits_of_every_token_of_a_prompt_with_images_match(exported, prompt):
    model, graph = exported.model, LanguageModel(exported.engine)
    tower = Graph(exported.engine / "visual" / "model.onnx")
    ids = prompt["input_ids"][0].numpy()
    embeds = graph.embedding[ids]
    rows = [tower(**inputs)["image_embeds"] for inputs in tower_inputs(exported)]
    embeds[ids == model.config.image_token_id] = np.concatenate(rows)
    positions = torch.from_numpy(exported.check_positions(prompt))[:, None]
    angles = model.model.language_model.rotary_emb(torch.zeros(1), positions)
    cos, sin = (each[..., : each.shape[-1] // 2] for each in angles)
    expected = model(**prompt).logits[0]
    assert expected.abs().max() > 0.5
    found = graph.step(embeds, cos, sin, wanted=range(len(ids)))
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("sizes", PROMPTS, ids=len)
def test_positions_greedy_tokens_and_log_probabilities_match(exported, sizes, runtime_device):
    check_answer(exported, runtime_device, sizes)


def test_videos_match(exported, runtime_device):
    check_videos(exported, runtime_device)


def test_a_batch_with_and_without_images_answers_as_transformers(exported, runtime_device):
    chosen = [IMAGES[:2], (), IMAGES[1:], IMAGES[:1]]
    limits = [12, 3, 5, 12]  # two leave the batch in the middle
    requests = [
        LLMGenerationRequest("go there", images=images, sampling=SamplingParams(max_tokens=limit), logprobs=5)
        for images, limit in zip(chosen, limits, strict=True)
    ]
    with LLMInferenceRuntime(exported.engine, runtime_device) as runtime:
        found = runtime.handle_request(requests)
        prompts = runtime.base_model_input_token_ids
    for answer, ids, images, limit in zip(found, prompts, chosen, limits, strict=True):
        check_greedy_answer(answer, exported.model, exported.inputs(ids, images), limit)


def test_turns_of_a_conversation_with_two_images_answer_as_transformers(exported, runtime_device):
    """Each turn begins with the state that was saved after the turn before."""
    turns = [[IMAGES[0], "what is this?"], ["where?"], ["and", IMAGES[2], "this?"]]
    messages, shown, reused = [], [], []
    with LLMInferenceRuntime(exported.engine, runtime_device) as runtime:
        for turn in turns:
            parts = [TextPart(part) if isinstance(part, str) else ImagePart(part) for part in turn]
            shown += [part for part in turn if not isinstance(part, str)]
            messages.append(Message("user", parts))
            sampling = SamplingParams(max_tokens=8)
            request = LLMGenerationRequest(messages=list(messages), sampling=sampling, logprobs=5)
            answer = runtime.handle_request(request)
            (ids,) = runtime.base_model_input_token_ids
            check_greedy_answer(answer, exported.model, exported.inputs(ids, shown), 8)
            messages.append(Message("assistant", answer.text))
            reused.append(answer.reused_tokens)
        assert runtime.multimodal_metrics.total_images == 2
    assert 0 == reused[0] < reused[1] < reused[2]
