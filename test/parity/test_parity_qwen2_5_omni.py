# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-Omni's thinker of random sizes against transformers.

The checkpoints have the published layout.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning")]
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from engine_graphs import LanguageModel  # noqa: E402
from greedy_answers import TOLERANCE, check_greedy_answer  # noqa: E402
from qwen_vl_reference import Exported, export_beside  # noqa: E402
from safetensors.numpy import load_file, save_file  # noqa: E402
from text_families import rope_rows  # noqa: E402
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil  # noqa: E402
from video_reference import Qwen2VLVideoProcessor, processor_arguments, without_torchvision  # noqa: E402

from edgellm_ros.builder import check  # noqa: E402
from edgellm_ros.engine.device import CpuDevice  # noqa: E402
from edgellm_ros.engine.executor import EngineExecutor  # noqa: E402
from edgellm_ros.engine_directory.config import EngineConfig  # noqa: E402
from edgellm_ros.multimodal.audio.processor import AudioProcessor  # noqa: E402
from edgellm_ros.multimodal.audio.runner import AudioRunner  # noqa: E402
from edgellm_ros.multimodal.sound import Sound  # noqa: E402
from edgellm_ros.multimodal.video import Video  # noqa: E402
from edgellm_ros.runtime.conversation import AudioPart, ImagePart, Message, TextPart, VideoPart  # noqa: E402
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from edgellm_ros.runtime.request import LLMGenerationRequest, LLMGenerationResponse, SamplingParams  # noqa: E402
from fixtures.pixel_values import group_pixel_values  # noqa: E402
from fixtures.qwen2_5_omni_checkpoint import TOKENS as NAMES  # noqa: E402
from fixtures.qwen2_5_omni_checkpoint import write_qwen2_5_omni  # noqa: E402
from fixtures.reference_inputs import make_image, make_sound  # noqa: E402

MODEL = transformers.Qwen2_5OmniThinkerForConditionalGeneration
PROCESSOR = transformers.Qwen2_5OmniProcessor
COUNT = 8  # checkpoints
LONG = 0  # the checkpoint that also takes the long sound
LONG_SECONDS = 40.0
SECONDS = [0.1, 0.73, 2.0, 2.02, 3.37]
TOKENS = 32  # of an answer
FEATURES_TOLERANCE, ROWS_TOLERANCE = 1e-4, 2e-5
SPECIAL = {
    "image_token": "image_token_index",
    "video_token": "video_token_index",
    "audio_token": "audio_token_index",
    "vision_bos_token": "vision_start_token_id",
    "vision_eos_token": "vision_end_token_id",
    "audio_bos_token": "audio_start_token_id",
    "audio_eos_token": "audio_end_token_id",
}


def random_changes(index: int) -> dict[str, Any]:
    """Choose sizes of a checkpoint."""
    rng = np.random.default_rng(index)
    pairs, kv_heads, group = int(rng.integers(4, 13)), int(rng.integers(1, 3)), int(rng.integers(1, 4))
    height, width = int(rng.integers(0, pairs // 2)), int(rng.integers(0, pairs // 2))
    heads, towers, depth = int(rng.integers(1, 5)), int(rng.integers(1, 4)), int(rng.integers(2, 5))
    text = {
        "hidden_size": 2 * pairs * kv_heads * group,
        "intermediate_size": int(rng.integers(30, 120)),
        "num_hidden_layers": int(rng.integers(1, 4)),
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": float(rng.choice([1e-6, 1e-5])),
        "rope_theta": float(rng.choice([1e4, 1e6])),
        "rope_scaling": {
            "mrope_section": [pairs - height - width, height, width],
            "rope_type": "default",
            "type": "default",
        },
    }
    audio = {
        "d_model": heads * int(rng.choice([4, 8, 10])),
        "encoder_attention_heads": heads,
        "encoder_ffn_dim": int(rng.integers(10, 60)),
        "encoder_layers": int(rng.integers(1, 4)),
        "n_window": int(rng.choice([100, 100, 50, 24])),
    }
    vision = {
        "depth": depth,
        "fullatt_block_indexes": sorted(rng.permutation(depth)[: int(rng.integers(0, depth + 1))].tolist()),
        "hidden_size": 8 * towers * int(rng.integers(1, 4)),
        "num_heads": towers,
        "intermediate_size": int(rng.integers(30, 90)),
    }
    rates = {
        "position_id_per_seconds": (25, 25, 25, 10)[index % 4],
        "seconds_per_chunk": (2, 2, 1)[index % 3],
    }
    return {"text": text, "audio": audio, "vision": vision, "thinker": rates, "seed": index}


@pytest.fixture(scope="module", params=range(COUNT))
def exported(request, tmp_path_factory) -> Exported:
    torch.set_num_threads(1)
    checkpoint = tmp_path_factory.mktemp("qwen2_5_omni") / "checkpoint"
    write_qwen2_5_omni(checkpoint, **random_changes(request.param))
    most = 1100 if request.param == LONG else 400
    return export_beside(checkpoint, MODEL, max_input_len=most, max_kv_cache_capacity=most + 200)


@pytest.fixture(scope="module")
def runtime(exported, runtime_device) -> Iterator[LLMInferenceRuntime]:
    with LLMInferenceRuntime(exported.engine, runtime_device) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def processor(exported) -> Any:
    checkpoint = exported.checkpoint
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(checkpoint / "tokenizer.json"),
        extra_special_tokens={name: NAMES[key] for name, key in SPECIAL.items()},
    )
    # It pads to 300 s, of which all but the end of the sound is masked; less takes less time.
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(checkpoint, chunk_length=45)
    with mock.patch.object(PROCESSOR, "check_argument_for_proper_class"):  # which looks for torchvision
        return PROCESSOR(
            image_processor=Qwen2VLImageProcessorPil.from_pretrained(checkpoint),
            video_processor=Qwen2VLVideoProcessor.from_pretrained(checkpoint),
            feature_extractor=extractor,
            tokenizer=tokenizer,
            chat_template=(checkpoint / "chat_template.jinja").read_text(),
        )


@cache
def sound(seconds: float) -> Sound:
    return Sound(make_sound(seconds, 16000), 16000)


@cache
def extracted(seconds: float, chunk_length: int = 45) -> tuple[torch.Tensor, torch.Tensor]:
    """Return features [1, bins, frames] and their mask as the processor makes them."""
    extractor = transformers.WhisperFeatureExtractor(feature_size=128, chunk_length=chunk_length)
    made = extractor(
        sound(seconds).samples,
        sampling_rate=16000,
        padding="max_length",
        return_attention_mask=True,
        return_tensors="pt",
    )
    return made["input_features"], made["attention_mask"]


def make_video(seed: int, frames: int, size: tuple[int, int], fps: float, seconds: float = 0.0) -> Video:
    still = make_image(*size)
    shifts = np.random.default_rng(seed).integers(0, still.size, frames)
    heard = sound(seconds) if seconds else None
    return Video([np.roll(still, shift, (0, 1)) for shift in shifts], fps=fps, sound=heard)


def make_cases() -> dict[str, list[Message]]:
    """Make conversations whose answers are compared."""
    question, image = TextPart("go there"), ImagePart(make_image(50, 40))
    short, longer = AudioPart(sound(0.73)), AudioPart(sound(3.37))
    silent = VideoPart(make_video(1, 5, (60, 90), fps=3))
    clip = VideoPart(make_video(2, 6, (60, 90), fps=2, seconds=3.37))
    tall = VideoPart(make_video(3, 4, (20, 150), fps=2, seconds=0.1))  # its columns go beyond its sound
    slow = VideoPart(make_video(4, 4, (48, 64), fps=0.4, seconds=2.02))  # 5 s between groups of frames
    fast = VideoPart(make_video(5, 3, (48, 64), fps=7, seconds=3.37))
    turns = [
        Message("user", [image, TextPart("then"), clip]),
        Message("assistant", "ok"),
        Message("user", [short, tall, question]),
    ]
    return {
        "sounds": [Message("user", [short, longer, AudioPart(sound(0.1)), question])],
        "an image and a sound": [Message("user", [image, short, question])],
        "a video with sound": [Message("user", [clip, question])],
        "a silent video, an image and a sound": [Message("user", [silent, short, image, question])],
        "videos with sound in several turns": turns,
        "more columns than sound": [Message("user", [tall, question])],
        "gaps of more than a chunk": [Message("user", [slow, question])],
        "a sound that is longer than its video": [Message("user", [longer, fast, question])],
    }


def reference_inputs(exported: Exported, processor: Any, request: LLMGenerationRequest) -> dict[str, Any]:
    """Return the model's inputs that transformers' processor makes of a conversation."""
    given = processor_arguments(processor, request)
    videos = request.prompt_videos
    with_sound = iter([index for index, video in enumerate(videos) if video.sound is not None])
    if any(request.sounds_of_videos):
        given["load_audio_from_video"] = True
        given["audio_from_video_indices"] = [
            next(with_sound) if of_video else None for of_video in request.sounds_of_videos
        ]
    config = exported.model.config
    rates = {
        "position_id_per_seconds": config.position_id_per_seconds,
        "seconds_per_chunk": float(config.seconds_per_chunk),
    }
    with without_torchvision():
        inputs = processor(**given, **rates)
    assert len({video.fps for video in videos}) <= 1  # the processor takes one rate for all videos
    return {**inputs, "use_audio_in_video": any(request.sounds_of_videos)}


def ask(messages: list[Message]) -> LLMGenerationRequest:
    return LLMGenerationRequest(
        messages=tuple(messages), sampling=SamplingParams(max_tokens=TOKENS), logprobs=5
    )


def encoded(exported: Exported, lengths: list[float], pads: bool = False) -> list[np.ndarray]:
    """Return the runner's rows of each sound; pads: as `AudioRunner` has it."""
    device, config = CpuDevice(), EngineConfig.load(exported.engine)
    executor = EngineExecutor.open(exported.engine / "audio" / "model.onnx", device)
    runner = AudioRunner(executor, config.audio, device, config.builder.max_input_len, pads)
    made = []
    for seconds in lengths:
        rows = device.empty((runner.num_tokens(sound(seconds)), config.llm.hidden_size), np.float32)
        runner.encode(sound(seconds), rows)
        made.append(device.download(rows))
    return made


def seconds_of(index: int) -> list[float]:
    return [*SECONDS, LONG_SECONDS] if index == LONG else SECONDS


@pytest.mark.parametrize("exported", [LONG], indirect=True)
@pytest.mark.parametrize("seconds", [0.0201, 0.73, 2.02, LONG_SECONDS])
def test_features_are_those_of_the_extractor(exported, seconds):
    config = EngineConfig.load(exported.engine).audio
    found = AudioProcessor(config).process(sound(seconds))
    published, mask = extracted(seconds, chunk_length=300)
    frames = int(mask.sum())
    assert found.shape == (128, frames)
    np.testing.assert_allclose(found, published[0, :, :frames], atol=FEATURES_TOLERANCE, rtol=0)
    np.testing.assert_array_equal(extracted(seconds)[0][0, :, :frames], published[0, :, :frames])


def test_the_runner_makes_the_reference_s_rows_of_a_sound(exported, request):
    lengths = seconds_of(request.node.callspec.params["exported"])
    made = encoded(exported, lengths), encoded(exported, lengths, pads=True)
    for seconds, found, padded in zip(lengths, *made, strict=True):
        expected = exported.model.get_audio_features(*extracted(seconds)).last_hidden_state.numpy()
        assert np.abs(expected).max() > 0.5
        np.testing.assert_allclose(found, expected, atol=ROWS_TOLERANCE, rtol=0)
        np.testing.assert_allclose(padded, expected, atol=ROWS_TOLERANCE, rtol=0)


def test_prompts_pixels_positions_and_greedy_answers_match(exported, processor, runtime, request):
    """An answer is compared with `generate`, and three with one run each.

    Each checkpoint has another one of the eight conversations for `generate`.
    """
    index = request.node.callspec.params["exported"]
    for number, (name, messages) in enumerate(make_cases().items()):
        asked = ask(messages)
        inputs = reference_inputs(exported, processor, asked)
        (sequence,) = runtime.pipeline.prepare([asked], 0)
        assert sequence.token_ids == inputs["input_ids"][0].tolist(), name
        videos = runtime.pipeline.vision.videos
        pixels = [
            group_pixel_values(videos, video, group)
            for video, layout in zip(asked.prompt_videos, sequence.videos, strict=True)
            for group in range(layout.grid.groups)
        ]
        if pixels:
            np.testing.assert_array_equal(np.concatenate(pixels), inputs["pixel_values_videos"].numpy())
        positions = check_positions(exported, inputs, sequence)
        if (number - index) % 2:
            continue
        found = runtime.handle_request(asked)
        assert len(found.token_ids) == TOKENS
        if number == index and positions[0, -1] == positions.max():
            check_greedy_answer(found, exported.model, inputs, TOKENS)
        else:
            check_tokens(exported, inputs, positions, found)


def check_tokens(
    exported: Exported, inputs: dict[str, Any], positions: torch.Tensor, found: LLMGenerationResponse
) -> None:
    """Check that each token of an answer is the most likely one after those before it.

    positions: of the prompt [3, S]. Those of the answer follow the largest, as the model's `rope_deltas` say;
    `generate` of transformers 5 lets them follow the last one, which differs where the columns of a video go
    beyond its sound.
    """
    ids = torch.cat([inputs["input_ids"], torch.tensor([found.token_ids[:-1]])], dim=1)
    later = positions.max() + 1 + torch.arange(ids.shape[1] - positions.shape[1])
    places = torch.cat([positions, later.expand(3, -1)], dim=1)[:, None]
    given = {**inputs, "input_ids": ids, "position_ids": places, "attention_mask": torch.ones_like(ids)}
    logits = exported.model(**given).logits[0, -TOKENS:]
    assert found.token_ids == logits.argmax(-1).tolist()
    assert logits.abs().max() > 0.5
    for entries, row in zip(found.logprobs, logits.double().log_softmax(-1), strict=True):
        chosen, values = zip(*entries, strict=True)
        np.testing.assert_allclose(values, row[list(chosen)], atol=TOLERANCE, rtol=0)


def check_positions(exported: Exported, inputs: dict[str, Any], sequence: Any) -> torch.Tensor:
    """Check the positions of a prompt, and return them [3, S]."""
    mask = inputs.get("feature_attention_mask")
    expected, delta = exported.model.get_rope_index(
        inputs["input_ids"],
        inputs.get("image_grid_thw"),
        inputs.get("video_grid_thw"),
        torch.ones_like(inputs["input_ids"]),
        inputs["use_audio_in_video"],
        audio_seqlens=None if mask is None else mask.sum(-1),
        second_per_grids=inputs.get("video_second_per_grid"),
    )
    np.testing.assert_array_equal(sequence.positions, expected[:, 0])
    assert sequence.rope_delta == int(delta)
    return expected[:, 0]


def test_logits_match_at_every_position(exported, processor):
    asked = ask(make_cases()["sounds"])
    inputs = reference_inputs(exported, processor, asked)
    ids, model = inputs["input_ids"][0].numpy(), LanguageModel(exported.engine)
    config = EngineConfig.load(exported.engine)
    embeds = model.embedding[ids]
    lengths = [sound.seconds for sound in asked.prompt_audio]
    embeds[ids == config.audio_token_id] = np.concatenate(encoded(exported, lengths))
    found = model.step(embeds, *rope_rows(config, 0, len(ids)), wanted=range(len(ids)))
    expected = exported.model(**inputs).logits[0].numpy()
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("exported", [1], indirect=True)
def test_a_thinker_alone_becomes_the_same_engine(exported, tmp_path):
    """transformers saves it with the names of the whole, or without their prefix."""
    exported.model.save_pretrained(tmp_path / "whole_names")
    tensors = load_file(tmp_path / "whole_names" / "model.safetensors")
    (tmp_path / "own_names").mkdir()
    shutil.copy(tmp_path / "whole_names" / "config.json", tmp_path / "own_names")
    own = {name.removeprefix("thinker."): tensor for name, tensor in tensors.items()}
    save_file(own, tmp_path / "own_names" / "model.safetensors")
    expected = check(exported.checkpoint).config
    for names in ("whole_names", "own_names"):
        for file in ("tokenizer.json", "chat_template.jinja", "preprocessor_config.json"):
            shutil.copy(exported.checkpoint / file, tmp_path / names)
        found = check(tmp_path / names).config
        for part in ("llm", "vision", "audio", "special_tokens", "stop_token_ids"):
            assert getattr(found, part) == getattr(expected, part)


@pytest.mark.parametrize("exported", [LONG], indirect=True)
def test_a_long_sound_is_answered_alike(exported, processor, runtime):
    asked = ask([Message("user", [AudioPart(sound(LONG_SECONDS)), TextPart("what?")])])
    check_greedy_answer(
        runtime.handle_request(asked), exported.model, reference_inputs(exported, processor, asked), TOKENS
    )
