# SPDX-License-Identifier: Apache-2.0
"""Replayed as graphs, decode steps and rounds of drafting give the same answers."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from edgellm_ros.builder import export
from edgellm_ros.runtime.decoding.speculative.drafting_config import SpecDecodeDraftingConfig
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures.random_requests import random_request
from fixtures.requests_for_tests import (
    IMAGE,
    assert_same_answer,
    assert_same_bits,
    assert_same_with_drafting,
    request,
)
from fixtures.tiny_adapter import write_adapter

pytestmark = pytest.mark.only_on("cuda", "tensorrt", "tensorrt-double", reason="the CPU has no graphs")
EAGLE = SpecDecodeDraftingConfig(3, 3, 10, falls_back=False)
LOOKUP = SpecDecodeDraftingConfig(1, 7, 8, "lookup", falls_back=False)
LONG = {"max_tokens": 20, "repetition_penalty": 1.3}


class CountedGraph:
    def __init__(self, graph, launches: list) -> None:
        self.graph, self.launches = graph, launches

    def launch(self, stream) -> None:
        self.launches.append(self)
        self.graph.launch(stream)


@pytest.fixture(scope="module")
def launches(device):
    """Every launch so far of a graph that a test of this file has recorded."""
    found: list[CountedGraph] = []
    capture = device.capture
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "capture", lambda record: CountedGraph(capture(record), found))
        yield found


@pytest.fixture(scope="module")
def recorded(acting_engine, device, launches):
    """A runtime whose decode steps are recorded."""
    with LLMInferenceRuntime(acting_engine, device, prefix_cache_bytes=0) as runtime:
        assert runtime.capture_decoding_cuda_graph() is True
        yield runtime


@pytest.mark.parametrize(
    "one",
    [
        request(images=(IMAGE,), action_samples=2, noise_seed=5, max_tokens=30),
        request("what do you see?", temperature=1.2, top_k=40, seed=3, **LONG),
        request("stop", logprobs=3, **LONG),
    ],
    ids=["trajectory", "sampled", "log-probabilities"],
)
def test_an_answer_has_the_bits_of_one_without_graphs(recorded, acting_runtime, one):
    assert_same_bits(recorded.handle_request(one), acting_runtime.handle_request(one))


@pytest.mark.parametrize("seed", range(4))
def test_random_requests_get_the_same_answers_in_random_batches(recorded, acting_runtime, seed):
    rng = np.random.default_rng(seed)
    requests = [random_request(rng) for _ in range(8)]
    alone = [acting_runtime.handle_request(make()) for make in requests]
    for _ in range(6):
        chosen = rng.permutation(8)[: rng.integers(2, 5)]
        answers = recorded.handle_request([requests[index]() for index in chosen])
        for index, answer in zip(chosen, answers, strict=True):
            assert_same_answer(answer, alone[index])


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_every_step_of_every_batch_size_is_a_launch(recorded, launches, batch):
    launches.clear()
    answers = recorded.handle_request([request(**LONG)] * batch)
    assert [len(answer.token_ids) for answer in answers] == [20] * batch
    (_, steps), *prefills = Counter(launches).most_common()
    assert steps == 19  # the prefill samples the first token
    assert sum(count for _, count in prefills) <= 2  # its run and its first token may be graphs of their own


def test_recorded_steps_use_later_adapters_and_a_replaced_lm_head(device, tiny_checkpoint, tmp_path_factory):
    """The adapter and the LM head are changed after the capture."""
    engine = tmp_path_factory.mktemp("extras")
    export(tiny_checkpoint, engine, max_lora_rank=8, lm_head_input=True)
    adapters = {name: write_adapter(engine / name, tiny_checkpoint, seed=ord(name), r=4) for name in "abc"}
    first = {name: adapters[name] for name in "ab"}
    with (
        LLMInferenceRuntime(engine, device, lora_dirs=first, prefix_cache_bytes=0) as plain,
        LLMInferenceRuntime(engine, device, lora_dirs=first, prefix_cache_bytes=0) as recorded,
    ):
        assert recorded.capture_decoding_cuda_graph() is True

        def compare(names) -> list[list[int]]:
            requests = [request(lora=name, **LONG) for name in names]
            answers = [recorded.handle_request(one) for one in requests]
            for one, answer in zip(requests, answers, strict=True):
                assert_same_bits(answer, plain.handle_request(one))
            for found, expected in zip(recorded.handle_request(requests), answers, strict=True):
                assert_same_answer(found, expected)
            return [answer.token_ids for answer in answers]

        before = compare(["", "a", "b"])
        for runtime in (plain, recorded):
            runtime.remove_lora("a")
            runtime.add_lora("c", adapters["c"])
        assert compare(["", "c", "b"])[::2] == before[::2]
        matrix = np.random.default_rng(0).standard_normal((48, 302)).astype(np.float32)
        for runtime in (plain, recorded):
            runtime.set_lm_head_weights("lm_head.weight", matrix)
        assert compare(["", "c", "b"]) != before


@pytest.mark.parametrize("drafting", [EAGLE, LOOKUP], ids=["eagle", "lookup"])
def test_rounds_of_drafting_are_launches(draft_engine, device, launches, drafting):
    options = {"prefix_cache_bytes": 0, "lora_dirs": {}}
    with (
        LLMInferenceRuntime(draft_engine, device, **options) as plain,
        LLMInferenceRuntime(draft_engine, device, drafting=drafting, **options) as recorded,
    ):
        assert recorded.capture_decoding_cuda_graph() is True
        for batch in ([request(**LONG)], [request("stop", **LONG)] * 2, [request(**LONG)] * 3):
            launches.clear()
            rounds = recorded.spec_decode_generation_metrics.total_runs
            answers = recorded.handle_request(batch)
            assert len(launches) == recorded.spec_decode_generation_metrics.total_runs - rounds > 0
            assert len(set(launches)) == 1
            for answer, expected in zip(answers, plain.handle_request(batch), strict=True):
                assert_same_with_drafting(answer, expected)
