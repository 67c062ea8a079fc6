# SPDX-License-Identifier: Apache-2.0
"""Prompts that are padded to a bucket have the bits of prompts that are not."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from doubles.deferred_runtime import WatchedDevice, queueing, used
from edgellm_ros.builder import export
from edgellm_ros.engine.errors import DeviceMemoryError
from edgellm_ros.engine.executor import KEPT_BINDINGS
from edgellm_ros.runtime import assemble
from edgellm_ros.runtime.batch.input_embedder import InputEmbedder
from edgellm_ros.runtime.decoding.speculative.drafting_config import SpecDecodeDraftingConfig
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.prompt.buckets import bucket_of, buckets
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams
from fixtures.hybrid_checkpoints import write_nemotron_h_checkpoint, write_qwen3_5_checkpoint
from fixtures.requests_for_tests import IMAGE, SOUND, assert_same_answer, request

EAGLE = SpecDecodeDraftingConfig(3, 3, 10, falls_back=False)  # not by times, which differ from run to run
pytestmark = pytest.mark.only_on("cpu", reason="a GPU pads always, and gives numbers up to rounding")


def test_a_bucket_has_room_for_a_prompt_and_little_padding():
    sizes = buckets(4096)
    assert sizes == sorted(set(sizes))
    for tokens in range(1, 4097):
        size = bucket_of(tokens)
        assert size in sizes
        assert tokens <= size < max(tokens + 16, tokens * 9 / 8 + 1)


def test_the_last_bucket_is_the_longest_prompt():
    assert buckets(40) == [16, 32, 40]
    assert buckets(1) == [1]


@contextmanager
def padded(engine, device, **options: object) -> Iterator[LLMInferenceRuntime]:
    """A runtime that pads prompts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "pads_prompts", lambda device: True)
        runtime = LLMInferenceRuntime(engine, device, **options)
    with runtime:
        yield runtime


def computed(runtime: LLMInferenceRuntime) -> list[int]:
    """Let a runtime note the tokens of its prefills, which the list gets."""
    lengths: list[int] = []
    runtime.pipeline.runner.prefill_executor.observe(
        lambda tensors: lengths.append(tensors["inputs_embeds"].shape[1])
    )
    return lengths


BATCHES = [
    [request()],
    [request(images=(IMAGE,), action_samples=1), request(), request(audio=(SOUND,))],
    [request(prompt="go to the red box and then turn left at the door " * 2, logprobs=3)],
]


@pytest.mark.parametrize("drafting", [None, EAGLE], ids=["off", "eagle"])
@pytest.mark.parametrize("prefix_cache_bytes", [0, 1 << 24], ids=["no reuse", "reuse"])
def test_answers_have_the_bits_of_prompts_without_padding(
    acting_draft_engine, runtime_device, drafting, prefix_cache_bytes
):
    options = {"drafting": drafting, "prefix_cache_bytes": prefix_cache_bytes}
    with (
        LLMInferenceRuntime(acting_draft_engine, runtime_device, **options) as plain,
        padded(acting_draft_engine, runtime_device, **options) as runtime,
    ):
        for batch in BATCHES * 2:
            for found, expected in zip(
                runtime.handle_request(batch), plain.handle_request(batch), strict=True
            ):
                assert_same_answer(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("write", [write_nemotron_h_checkpoint, write_qwen3_5_checkpoint])
def test_a_recurrent_state_is_that_of_the_prompts_last_token(write, tmp_path, runtime_device):
    export(write(tmp_path / "checkpoint", 3), tmp_path / "engine")
    texts = ["go", "turn left at the door", "go to the red box and then turn left at the door " * 2]
    requests = [
        LLMGenerationRequest(text, sampling=SamplingParams(max_tokens=6), logprobs=3) for text in texts
    ]
    with (
        LLMInferenceRuntime(tmp_path / "engine", runtime_device, drafting=None) as plain,
        padded(tmp_path / "engine", runtime_device, drafting=None) as runtime,
    ):
        for batch in ([one] for one in requests), [requests], ([one] for one in requests):
            for each in batch:
                for found, expected in zip(
                    runtime.handle_request(each), plain.handle_request(each), strict=True
                ):
                    assert_same_answer(found, expected)


def test_prompts_run_with_the_tokens_of_a_bucket_as_far_as_there_is_room(acting_engine, runtime_device):
    with padded(acting_engine, runtime_device, prefix_cache_bytes=0, drafting="off") as runtime:
        lengths = computed(runtime)
        most = runtime.config.max_supported_input_length
        tokens = []
        for words in (1, 3, 9, 27, 40):
            before = len(lengths)
            one = dataclasses.replace(request(prompt="go " * words), sampling=SamplingParams(max_tokens=1))
            tokens.append(runtime.handle_request(one).prompt_tokens)
            assert lengths[before] == min(bucket_of(tokens[-1]), most)
        assert len(set(tokens)) == 5


def test_hidden_states_that_a_caller_keeps_are_not_padded(acting_engine, runtime_device):
    with padded(acting_engine, runtime_device, prefix_cache_bytes=0) as runtime:
        lengths = computed(runtime)
        answer = runtime.handle_request(request(), output_thinker_embeddings=True)
        assert lengths[0] == answer.prompt_tokens
        assert bucket_of(answer.prompt_tokens) != answer.prompt_tokens


def test_warming_up_leaves_no_trace(acting_draft_engine, runtime_device):
    with (
        LLMInferenceRuntime(acting_draft_engine, runtime_device, drafting=EAGLE) as plain,
        padded(acting_draft_engine, runtime_device, drafting=EAGLE, cuda_graphs=False) as runtime,
    ):
        lengths = computed(runtime)
        runtime.pipeline.prefills.warm_up(runtime.pipeline.device)
        most = min(runtime.config.max_supported_input_length, runtime.pipeline.runner.kv_cache.capacity)
        assert lengths == buckets(most)
        cache = runtime.pipeline.runner.kv_cache
        assert not np.any(runtime.pipeline.device.download(cache.lengths(range(1))))
        assert_same_answer(runtime.handle_request(request()), plain.handle_request(request()))


def test_the_first_prompt_of_a_length_replays_a_graph(acting_engine, caplog):
    options = {"prefix_cache_bytes": 0, "drafting": "off"}
    with (
        queueing(),
        caplog.at_level(logging.INFO, "edgellm_ros"),
        LLMInferenceRuntime(acting_engine, WatchedDevice(), **options) as runtime,
    ):
        sizes = buckets(runtime.config.max_supported_input_length)
        expected = rf"ran prompts of {len(sizes)} lengths up to {sizes[-1]} tokens in \d+\.\d s, \d+ MB"
        assert any(re.fullmatch(expected, record.getMessage()) for record in caplog.records)
        for words in (1, 4, 16, 30):
            one = request(prompt="go " * words, max_tokens=1)
            assert used(runtime, one) == (2, 0)  # prefill and first token; nothing is recorded


def test_a_prompt_that_joins_a_batch_in_a_row_for_the_third_time_replays_a_graph(acting_engine):
    options = {"prefix_cache_bytes": 0, "drafting": "off"}
    one = request(prompt="go to the door", max_tokens=1)
    with queueing(), LLMInferenceRuntime(acting_engine, WatchedDevice(), **options) as runtime:
        pipeline = runtime.pipeline
        for row in range(runtime.config.builder.max_batch_size):
            [sequence] = pipeline.preparer.prepare([one], 0)
            pipeline.batch.admit([sequence])
            for _ in range(3):
                pipeline.device.calls.clear()
                sequence.kv_length = 0
                pipeline.prefills.compute([sequence], range(row, row + 1))
            assert (pipeline.device.calls["launch"], pipeline.device.calls["capture"]) == (1, 0)


def test_a_prompt_that_cannot_run_in_advance_is_logged_and_answers_are_right(
    acting_engine, runtime_device, monkeypatch, caplog
):
    options = {"prefix_cache_bytes": 0, "drafting": "off"}
    embed = InputEmbedder.embed_prompts

    def embed_few(embedder, token_ids):
        if token_ids.shape[1] > 32:
            raise DeviceMemoryError("none left")
        return embed(embedder, token_ids)

    with queueing(), monkeypatch.context() as patch:
        patch.setattr(InputEmbedder, "embed_prompts", embed_few)
        runtime = LLMInferenceRuntime(acting_engine, WatchedDevice(), **options)
        patch.undo()
        with runtime, LLMInferenceRuntime(acting_engine, runtime_device, **options) as plain:
            assert len(runtime.pipeline.vanilla.recorded) > 0
            assert_same_answer(runtime.handle_request(request()), plain.handle_request(request()))
    assert [record.getMessage() for record in caplog.records] == [
        "prompts of 48 and more tokens are not run in advance: none left",
        "nothing is answered in advance: none left",
    ]


def test_graphs_of_prompts_run_in_advance_outlive_those_of_batches_and_adapters(acting_engine):
    with (
        queueing(),
        LLMInferenceRuntime(acting_engine, WatchedDevice(), prefix_cache_bytes=0) as runtime,
    ):
        short = request(max_tokens=1)
        for words in range(KEPT_BINDINGS):
            for _ in range(2):  # each batch is recorded
                runtime.handle_request([short, request(prompt="go " * 3 * words, max_tokens=1)])
                runtime.handle_request([short, request(prompt="go " * 3 * words, max_tokens=1), short])
        assert used(runtime, short) == (2, 0)
