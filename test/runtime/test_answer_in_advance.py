# SPDX-License-Identifier: Apache-2.0
"""A runtime on a GPU answers a few words when it is made, without a trace."""

from __future__ import annotations

import dataclasses

import pytest

from doubles.deferred_runtime import WatchedDevice, queueing
from edgellm_ros.builder import export
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.runtime.answer_in_advance import TIMES
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.metrics import RuntimeMetrics
from edgellm_ros.runtime.pipeline import Pipeline
from edgellm_ros.runtime.sampling_params import SamplingParams
from edgellm_ros.runtime.transcript import transcription_request
from fixtures.qwen3_asr_checkpoint import ORIGINAL, write_qwen3_asr
from fixtures.reference_inputs import make_sound
from fixtures.requests_for_tests import assert_same_answer, request

pytestmark = pytest.mark.only_on("cpu", reason="these tests bring their own device")


@pytest.fixture(scope="module", autouse=True)
def _queueing():
    with queueing():
        yield


@pytest.fixture
def answered(monkeypatch):
    """The texts that were prefilled when a runtime was made."""
    texts, prefill = [], Pipeline.prefill

    def watched(pipeline, sequences, **options):
        texts.extend(sequence.request.prompt for sequence in sequences)
        prefill(pipeline, sequences, **options)

    monkeypatch.setattr(Pipeline, "prefill", watched)
    return texts


@pytest.mark.parametrize("drafting", ["off", "auto"])
def test_it_changes_neither_counters_nor_caches_nor_answers(
    acting_draft_engine, acting_runtime, answered, drafting
):
    with LLMInferenceRuntime(acting_draft_engine, WatchedDevice(), drafting=drafting) as runtime:
        assert answered == ["hello"] * TIMES
        fresh = RuntimeMetrics()
        fresh.spec_decode.strategy = runtime.spec_decode_generation_metrics.strategy
        assert runtime._metrics == fresh
        assert not runtime.pipeline.batch.sequences
        first = runtime.handle_request(request())
        assert not first.reused_tokens
        assert_same_answer(first, acting_runtime.handle_request(request()))


def test_an_engine_for_speech_to_text_answers_no_text(tmp_path, answered):
    checkpoint = write_qwen3_asr(tmp_path / "checkpoint", ORIGINAL)
    export(checkpoint, tmp_path / "engine")
    sound = Sound(make_sound(0.3, 16000), 16000)
    request = dataclasses.replace(transcription_request([sound]), sampling=SamplingParams(max_tokens=8))
    with LLMInferenceRuntime(tmp_path / "engine") as runtime:
        expected = runtime.handle_request(request).token_ids
    answered.clear()
    with LLMInferenceRuntime(tmp_path / "engine", WatchedDevice()) as runtime:
        assert answered == [""] * TIMES
        assert runtime.handle_request(request).token_ids == expected


def test_a_second_capture_answers_nothing_again(acting_engine, answered):
    with LLMInferenceRuntime(acting_engine, WatchedDevice()) as runtime:
        runtime.capture_decoding_cuda_graph()
    assert answered == ["hello"] * TIMES


def test_without_graphs_nothing_is_answered(acting_engine, answered):
    with LLMInferenceRuntime(acting_engine, WatchedDevice(), cuda_graphs=False):
        assert not answered


def test_an_engine_that_takes_no_such_prompt_is_opened(acting_engine, answered, monkeypatch):
    def refuse(pipeline, requests, noise_seed):
        raise ValueError("the prompt has more tokens than the engine takes")

    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "prepare", refuse)
        LLMInferenceRuntime(acting_engine, WatchedDevice()).close()
    assert not answered


def test_counters_are_restored_in_place():
    metrics = RuntimeMetrics()
    prefill = metrics.prefill
    prefill.total_runs = 3
    before = dataclasses.asdict(metrics)
    with metrics.unchanged():
        prefill.total_runs, metrics.action.seconds = 5, 1.0
    assert dataclasses.asdict(metrics) == before
    assert metrics.prefill is prefill


def test_counters_are_restored_after_an_error():
    metrics = RuntimeMetrics()

    def fail():
        with metrics.unchanged():
            metrics.prefill.total_runs = 5
            raise EngineError("a step fails")

    with pytest.raises(EngineError, match="a step fails"):
        fail()
    assert metrics == RuntimeMetrics()
