# SPDX-License-Identifier: Apache-2.0
"""Videos of Qwen3-Omni thinkers against transformers.

The thinkers have random sizes, and there are images and sounds beside the videos.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from greedy_answers import TOKENS, check_greedy_answer  # noqa: E402
from qwen_vl_reference import Exported, export_beside, save_random_weights  # noqa: E402
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil  # noqa: E402
from video_reference import Qwen2VLVideoProcessor, processor_arguments, without_torchvision  # noqa: E402

from edgellm_ros.multimodal.sound import Sound  # noqa: E402
from edgellm_ros.multimodal.video import Video  # noqa: E402
from edgellm_ros.runtime.conversation import AudioPart, ImagePart, Message, TextPart, VideoPart  # noqa: E402
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams  # noqa: E402
from fixtures.pixel_values import group_pixel_values  # noqa: E402
from fixtures.reference_inputs import make_image, make_sound  # noqa: E402
from fixtures.tiny_checkpoint import write_json, write_tiny_checkpoint  # noqa: E402

MODEL = transformers.Qwen3OmniMoeThinkerForConditionalGeneration
PROCESSOR = transformers.Qwen3OmniMoeProcessor
PATCH = 40  # large, because the processor makes frames of at least 128 * 32 * 32 pixels
NAMES = ("image", "video", "audio", "vision_bos", "vision_eos", "audio_bos", "audio_eos")
TOKEN_NAMES = (
    "image_pad", "video_pad", "audio_pad", "vision_start", "vision_end", "audio_start", "audio_end",
)  # fmt: skip
SPECIAL = {f"{name}_token": f"<|{token}|>" for name, token in zip(NAMES, TOKEN_NAMES, strict=True)}


def write_random_checkpoint(directory: Path, seed: int) -> Path:
    """Write a checkpoint of transformers' own making, with random sizes and weights."""
    write_tiny_checkpoint(directory, action_expert=False, shards=1, videos=True)
    rng = np.random.default_rng(seed)
    config = json.loads((directory / "config.json").read_text())
    text, vision = config["text_config"], config["vision_config"]
    text["num_hidden_layers"] = int(rng.integers(2, 5))
    if seed:
        config["position_id_per_seconds"] = int(rng.choice([10, 13]))
    vision |= {"patch_size": PATCH, "num_position_embeddings": int(rng.integers(3, 9)) ** 2}
    write_json(directory / "config.json", config)
    processor = json.loads((directory / "preprocessor_config.json").read_text())
    area = (2 * PATCH) ** 2
    limits = {"shortest_edge": 4 * area, "longest_edge": 20 * area}
    write_json(directory / "preprocessor_config.json", processor | {"patch_size": PATCH, "size": limits})
    if seed % 2:
        video = {key: processor[key] for key in ("temporal_patch_size", "merge_size", "image_mean")}
        video |= {"patch_size": PATCH, "video_processor_type": "Qwen2VLVideoProcessor", "size": limits}
        video |= {"image_std": [0.5, 0.4, 0.3], "cap_pixels_per_frame": True, "max_video_tokens": 80}
        write_json(directory / "video_preprocessor_config.json", video)
    save_random_weights(MODEL, directory, seed)
    return directory


@pytest.fixture(scope="module", params=range(2))
def exported(request, tmp_path_factory) -> Exported:
    directory = tmp_path_factory.mktemp("omni") / "checkpoint"
    write_random_checkpoint(directory, request.param)
    return export_beside(directory, MODEL, max_input_len=500, max_kv_cache_capacity=800)


@pytest.fixture(scope="module")
def processor(exported) -> Any:
    checkpoint = exported.checkpoint
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(checkpoint / "tokenizer.json"), extra_special_tokens=SPECIAL
    )
    with mock.patch.object(PROCESSOR, "check_argument_for_proper_class"):  # which looks for torchvision
        return PROCESSOR(
            image_processor=Qwen2VLImageProcessorPil.from_pretrained(checkpoint),
            video_processor=Qwen2VLVideoProcessor.from_pretrained(checkpoint),
            feature_extractor=transformers.WhisperFeatureExtractor.from_pretrained(checkpoint),
            tokenizer=tokenizer,
            chat_template=(checkpoint / "chat_template.jinja").read_text(),
        )


def make_video(seed: int, frames: int, size: tuple[int, int], fps: float) -> Video:
    still = make_image(*size)
    shifts = np.random.default_rng(seed).integers(0, still.size, frames)
    return Video([np.roll(still, shift, (0, 1)) for shift in shifts], fps=fps)


def make_cases() -> dict[str, list[Message]]:
    """Make conversations whose answers are compared."""
    image, sound = ImagePart(make_image(50, 40)), AudioPart(Sound(make_sound(1.3, 16000), 16000))
    question = TextPart("go there")
    fast = VideoPart(make_video(1, 4, (60, 90), fps=3))  # groups 8 2/3 or 16 2/3 positions apart
    slow = VideoPart(make_video(2, 3, (90, 40), fps=0.75))
    one = VideoPart(make_video(3, 5, (48, 64), fps=2))
    turns = [
        Message("user", [VideoPart(make_video(4, 2, (64, 48), fps=3)), image, TextPart("then"), fast]),
        Message("assistant", "ok"),
        Message("user", [image, question]),
    ]
    return {
        "an odd number of frames": [Message("user", [one, question])],
        "fractions of positions": [Message("user", [fast, question])],
        "two videos and images in several turns": turns,
        "two rates, an image and a sound": [Message("user", [fast, sound, slow, image, question])],
        "a sound before a video": [Message("user", [sound, one, question])],
        "no video": [Message("user", [image, sound, question])],
    }


def reference_inputs(processor: Any, request: LLMGenerationRequest) -> Any:
    """Return the model's inputs that transformers' processor makes of a conversation."""
    videos, given = request.prompt_videos, processor_arguments(processor, request)
    with without_torchvision():
        inputs = processor(**given)
    if videos:
        seconds = torch.tensor([2 / video.fps for video in videos])
        assert seconds[0] == inputs["video_second_per_grid"][0]
        inputs["video_second_per_grid"] = seconds  # the processor takes one rate for all videos
    return inputs


@pytest.mark.parametrize("case", make_cases())
def test_prompt_pixels_positions_and_greedy_answer_match(exported, processor, case, runtime_device):
    sampling = SamplingParams(max_tokens=TOKENS)
    request = LLMGenerationRequest(messages=make_cases()[case], sampling=sampling, logprobs=5)
    inputs = reference_inputs(processor, request)
    with LLMInferenceRuntime(exported.engine, runtime_device) as runtime:
        (sequence,) = runtime.pipeline.prepare([request], 0)
        found = runtime.handle_request(request)
        videos = runtime.pipeline.vision.videos
    assert sequence.token_ids == inputs["input_ids"][0].tolist()
    pixels = [
        group_pixel_values(videos, video, group)
        for video, layout in zip(request.prompt_videos, sequence.videos, strict=True)
        for group in range(layout.grid.groups)
    ]
    if pixels:
        np.testing.assert_array_equal(np.concatenate(pixels), inputs["pixel_values_videos"].numpy())
    mask = inputs.get("feature_attention_mask")
    expected, delta = exported.model.get_rope_index(
        inputs["input_ids"],
        inputs.get("image_grid_thw"),
        inputs.get("video_grid_thw"),
        torch.ones_like(inputs["input_ids"]),
        audio_seqlens=None if mask is None else mask.sum(-1),
        second_per_grids=inputs.get("video_second_per_grid"),
    )
    # The reference adds up positions piece by piece; fractions differ by the last bits of float32.
    np.testing.assert_allclose(sequence.positions, expected[:, 0], rtol=1e-6)
    assert sequence.rope_delta == pytest.approx(float(delta), abs=1e-4)
    check_greedy_answer(found, exported.model, dict(inputs))
