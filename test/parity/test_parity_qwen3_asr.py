# SPDX-License-Identifier: Apache-2.0
"""Qwen3-ASR of random sizes, in both published layouts, against transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from engine_graphs import LanguageModel  # noqa: E402
from greedy_answers import TOKENS, TOLERANCE, check_greedy_answer  # noqa: E402
from speech_reference import SpeechReference, extracted  # noqa: E402
from text_families import rope_rows  # noqa: E402
from transformers import Qwen3ASRFeatureExtractor  # noqa: E402
from transformers.models.qwen3_asr import processing_qwen3_asr as processing  # noqa: E402

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.engine.device import CpuDevice  # noqa: E402
from edgellm_ros.engine.executor import EngineExecutor  # noqa: E402
from edgellm_ros.engine_directory.config import EngineConfig  # noqa: E402
from edgellm_ros.multimodal.audio.processor import AudioProcessor  # noqa: E402
from edgellm_ros.multimodal.audio.runner import AudioRunner  # noqa: E402
from edgellm_ros.multimodal.sound import Sound  # noqa: E402
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams  # noqa: E402
from edgellm_ros.runtime.transcript import LANGUAGES, read_transcript, transcription_request  # noqa: E402
from fixtures.qwen3_asr_checkpoint import ALIASES, LAYOUTS, ORIGINAL, TEMPLATES, TRANSFORMERS, write_qwen3_asr  # noqa: E402
from fixtures.reference_inputs import make_sound  # noqa: E402
from fixtures.whisper_features import WHISPER  # noqa: E402

ROWS_TOLERANCE = 2e-5
COUNT = 8  # checkpoints of each layout
LONG = ORIGINAL, 0  # the checkpoint that also takes the long sound
LONG_SECONDS = 40.0
SECONDS = [0.1, 0.3, 0.73, 1.0, 1.5, 8.1]
EXTRACTOR = dataclasses.replace(WHISPER, min_samples=8000, whole_chunks=True)
CONTEXT = "charging dock, forklift"
# Context, seconds of each sound, language that is forced.
PROMPTS = [("", [0.3], None), (CONTEXT, [0.73, 0.1, 1.5], None), (CONTEXT, [8.1], "German")]


def random_changes(index: int) -> dict[str, Any]:
    """Choose sizes and switches of a checkpoint."""
    rng = np.random.default_rng(index)
    kv_heads, heads = int(rng.integers(1, 4)), int(rng.integers(1, 5))
    text = {
        "hidden_size": 16 * int(rng.integers(2, 6)),
        "intermediate_size": 8 * int(rng.integers(3, 12)),
        "num_hidden_layers": int(rng.integers(1, 4)),
        "num_attention_heads": kv_heads * int(rng.integers(1, 4)),
        "num_key_value_heads": kv_heads,
        "head_dim": int(rng.choice([8, 16, 24, 32])),
        "rms_norm_eps": float(rng.choice([1e-6, 1e-5])),
        "rope_theta": float(rng.choice([1e4, 1e6])),
        "tie_word_embeddings": index % 3 > 0,
    }
    audio = {
        "d_model": heads * int(rng.choice([4, 8, 10])),
        "encoder_attention_heads": heads,
        "encoder_layers": int(rng.integers(1, 4)),
        "encoder_ffn_dim": int(rng.integers(10, 60)),
        "downsample_hidden_size": int(rng.integers(2, 8)),
        "n_window_infer": (800, 400, 200)[index % 3],
    }
    return {
        "text": text,
        "audio": audio,
        "seed": index,
        "stored_head": index % 3 == 0,
        "aliases": ((), tuple(ALIASES), ("encoder_attention_heads",))[index % 3],
    }


@dataclass(frozen=True)
class Case:
    engine: Path
    config: EngineConfig
    reference: SpeechReference
    seconds: list[float]
    prompts: list[tuple[str, list[float], str | None]]


@pytest.fixture(
    scope="module",
    params=[(layout, index) for layout in LAYOUTS for index in range(COUNT)],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def case(request, tmp_path_factory) -> Case:
    layout, index = request.param
    folder, is_long = tmp_path_factory.mktemp("qwen3_asr"), request.param == LONG
    changes = random_changes(index)
    checkpoint = write_qwen3_asr(folder / "checkpoint", layout, **changes)
    most = 640 if is_long else 160
    config = export(checkpoint, folder / "engine", max_input_len=most, max_kv_cache_capacity=most + 128)
    return Case(
        folder / "engine",
        config,
        SpeechReference(checkpoint, layout),
        [*SECONDS, LONG_SECONDS] if is_long else SECONDS,
        [*PROMPTS, ("", [LONG_SECONDS], None)] if is_long else PROMPTS,
    )


@pytest.fixture(scope="module")
def runtime(case, runtime_device) -> Iterator[LLMInferenceRuntime]:
    with LLMInferenceRuntime(case.engine, runtime_device) as runtime:
        yield runtime


@cache
def sound(seconds: float) -> np.ndarray:
    return make_sound(seconds, 16000)


def ask(context: str, lengths: list[float], language: str | None) -> LLMGenerationRequest:
    sounds = [Sound(sound(seconds), 16000) for seconds in lengths]
    request = transcription_request(sounds, language, context)
    return dataclasses.replace(request, sampling=SamplingParams(max_tokens=TOKENS), logprobs=8)


def encoded(case: Case, lengths: list[float], pads: bool = False) -> list[np.ndarray]:
    """Return the runner's rows of each sound; pads: as `AudioRunner` has it."""
    device, config = CpuDevice(), case.config
    executor = EngineExecutor.open(case.engine / "audio" / "model.onnx", device)
    runner = AudioRunner(executor, config.audio, device, config.builder.max_input_len, pads)
    made = []
    for seconds in lengths:
        one = Sound(sound(seconds), 16000)
        rows = device.empty((runner.num_tokens(one), config.llm.hidden_size), np.float32)
        runner.encode(one, rows)
        made.append(device.download(rows))
    return made


@pytest.mark.parametrize("seconds", [0.02, *SECONDS, LONG_SECONDS])
def test_features_are_those_of_the_extractor(seconds):
    found = AudioProcessor(EXTRACTOR).process(Sound(sound(seconds), 16000))
    expected, mask = extracted(Qwen3ASRFeatureExtractor(), [sound(seconds)])
    frames = int(mask.sum())
    assert found.shape == (128, frames)
    np.testing.assert_allclose(found, expected[0, :, :frames], atol=1e-4, rtol=0)


def test_the_runner_makes_the_reference_s_rows_of_a_sound(case):
    made = encoded(case, case.seconds), encoded(case, case.seconds, pads=True)
    for seconds, found, padded in zip(case.seconds, *made, strict=True):
        expected = case.reference.rows([sound(seconds)])
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(found, expected, atol=ROWS_TOLERANCE, rtol=0)
        np.testing.assert_allclose(padded, expected, atol=ROWS_TOLERANCE, rtol=0)


def test_prompts_and_positions_are_the_reference_s(case, runtime):
    for context, lengths, language in case.prompts:
        (sequence,) = runtime.pipeline.preparer.prepare([ask(context, lengths, language)], 0)
        expected = case.reference.inputs(context, [sound(seconds) for seconds in lengths], language)
        assert sequence.token_ids == expected["input_ids"][0].tolist()
        plain = np.arange(len(sequence.token_ids))
        np.testing.assert_array_equal(sequence.positions, [plain] * 3)
        assert sequence.rope_delta == 0


def test_logits_match_at_every_position(case):
    context, lengths, language = PROMPTS[1]
    inputs = case.reference.inputs(context, [sound(seconds) for seconds in lengths], language)
    ids, model = inputs["input_ids"][0].numpy(), LanguageModel(case.engine)
    embeds = model.embedding[ids]
    embeds[ids == case.config.audio_token_id] = np.concatenate(encoded(case, lengths))
    rows = rope_rows(case.config, 0, len(ids))
    found = model.step(embeds, *rows, wanted=range(len(ids)))
    expected = case.reference.model(**inputs).logits[0].numpy()
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)


def test_greedy_answers_match(case, runtime):
    for context, lengths, language in case.prompts[1:]:
        found = runtime.handle_request(ask(context, lengths, language))
        inputs = case.reference.inputs(context, [sound(seconds) for seconds in lengths], language)
        assert len(found.token_ids) == TOKENS
        check_greedy_answer(found, case.reference.model, inputs)


def test_a_request_is_that_of_the_processor(case, runtime):
    """Both layouts have the prompts of the template of transformers' layout."""
    processor, template = case.reference.processor, TEMPLATES[TRANSFORMERS]
    for context, (seconds, *others), language in case.prompts:
        if others:
            continue
        made = processor.apply_transcription_request(
            sound(seconds), language, context or None, chat_template=template
        )
        (sequence,) = runtime.pipeline.preparer.prepare([ask(context, [seconds], language)], 0)
        assert sequence.token_ids == made["input_ids"][0].tolist()


def test_the_languages_are_those_of_the_processor():
    assert LANGUAGES == processing.LANGUAGE_CODE_TO_NAME


def random_answer(seed: int) -> str:
    """Return an answer with runs of characters and of patterns."""
    rng = np.random.default_rng(seed)
    parts = []
    for _ in range(int(rng.integers(0, 5))):
        pattern = "".join(rng.choice(list("ab \n"), int(rng.choice([1, 1, 2, 3, 19, 20, 21]))))
        parts.append(pattern * int(rng.choice([1, 2, 10, 19, 20, 21, 22, 45])))
    prefixes = [
        "",
        "language English<asr_text>",
        "language None<asr_text>",
        "English\nx<asr_text>",
        "<asr_text>",
    ]
    return str(rng.choice(prefixes)) + "".join(parts)


def test_transcripts_are_those_of_the_processor():
    config = SimpleNamespace(special_tokens=SimpleNamespace(transcript_token_id=0), stop_token_ids=())
    answers, collapsed = [random_answer(seed) for seed in range(600)], 0
    for text in answers:
        response = SimpleNamespace(text=text, token_ids=[], logprobs=None)
        found, expected = read_transcript(response, config), processing._parse_single_output(text)
        assert (found.text, found.language) == (expected["transcription"], expected["language"]), text
        collapsed += len(found.text) + 30 < len(text)
    assert collapsed > 100
