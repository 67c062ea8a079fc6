# SPDX-License-Identifier: Apache-2.0
"""Qwen3-ASR of random sizes, in both published layouts, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
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

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.engine.device import CpuDevice  # noqa: E402
from edgellm_ros.engine.executor import EngineExecutor  # noqa: E402
from edgellm_ros.engine_directory.config import EngineConfig  # noqa: E402
from edgellm_ros.multimodal.audio.config import AudioConfig  # noqa: E402
from edgellm_ros.multimodal.audio.processor import AudioProcessor  # noqa: E402
from edgellm_ros.multimodal.audio.runner import AudioRunner  # noqa: E402
from edgellm_ros.multimodal.sound import Sound  # noqa: E402
from edgellm_ros.runtime.conversation import AudioPart, Message  # noqa: E402
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams  # noqa: E402
from fixtures.qwen3_asr_checkpoint import ALIASES, LAYOUTS, ORIGINAL, write_qwen3_asr  # noqa: E402
from fixtures.reference_inputs import make_sound  # noqa: E402

ROWS_TOLERANCE = 2e-5
COUNT = 8  # checkpoints of each layout
LONG = ORIGINAL, 0  # the checkpoint that also takes the long sound
LONG_SECONDS = 40.0
SECONDS = [0.1, 0.3, 0.73, 1.0, 1.5, 8.1]
EXTRACTOR = AudioConfig(
    d_model=8,
    encoder_layers=1,
    encoder_attention_heads=1,
    output_dim=8,
    n_window=50,
    n_window_infer=800,
    num_mel_bins=128,
    sampling_rate=16000,
    n_fft=400,
    hop_length=160,
    min_samples=8000,
    whole_chunks=True,
)
CONTEXT = "charging dock, forklift"
# Context, seconds of each sound, beginning of the answer.
PROMPTS = [("", [0.3], ""), (CONTEXT, [0.73, 0.1, 1.5], ""), (CONTEXT, [8.1], "language German<asr_text>")]


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
    prompts: list[tuple[str, list[float], str]]


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
        [*PROMPTS, ("", [LONG_SECONDS], "")] if is_long else PROMPTS,
    )


@pytest.fixture(scope="module")
def runtime(case, runtime_device) -> Iterator[LLMInferenceRuntime]:
    with LLMInferenceRuntime(case.engine, runtime_device) as runtime:
        yield runtime


def sound(seconds: float) -> np.ndarray:
    return make_sound(seconds, 16000)


def ask(context: str, lengths: list[float], beginning: str) -> LLMGenerationRequest:
    parts = [AudioPart(Sound(sound(seconds), 16000)) for seconds in lengths]
    messages = [Message("system", context), Message("user", parts)]
    return LLMGenerationRequest(
        messages=(*messages, Message("assistant", beginning)) if beginning else tuple(messages),
        continue_final_message=bool(beginning),
        sampling=SamplingParams(max_tokens=TOKENS),
        logprobs=8,
    )


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
    for context, lengths, beginning in case.prompts:
        (sequence,) = runtime.pipeline.preparer.prepare([ask(context, lengths, beginning)], 0)
        expected = case.reference.inputs(context, [sound(seconds) for seconds in lengths], beginning)
        assert sequence.token_ids == expected["input_ids"][0].tolist()
        plain = np.arange(len(sequence.token_ids))
        np.testing.assert_array_equal(sequence.positions, [plain] * 3)
        assert sequence.rope_delta == 0


def test_logits_match_at_every_position(case):
    context, lengths, beginning = PROMPTS[1]
    inputs = case.reference.inputs(context, [sound(seconds) for seconds in lengths], beginning)
    ids, model = inputs["input_ids"][0].numpy(), LanguageModel(case.engine)
    embeds = model.embedding[ids]
    embeds[ids == case.config.audio_token_id] = np.concatenate(encoded(case, lengths))
    rows = rope_rows(case.config, 0, len(ids))
    found = model.step(embeds, *rows, wanted=range(len(ids)))
    expected = case.reference.model(**inputs).logits[0].numpy()
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)


def test_greedy_answers_match(case, runtime):
    for context, lengths, beginning in case.prompts[1:]:
        found = runtime.handle_request(ask(context, lengths, beginning))
        inputs = case.reference.inputs(context, [sound(seconds) for seconds in lengths], beginning)
        assert len(found.token_ids) == TOKENS
        check_greedy_answer(found, case.reference.model, inputs)
