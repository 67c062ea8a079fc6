# SPDX-License-Identifier: Apache-2.0
"""Finished sequences leave the batch without any effect on the other answers."""

import numpy as np
import pytest

from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures.random_requests import cancelled_at, random_request
from fixtures.requests_for_tests import IMAGE, assert_same_answer, request


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_requests_get_the_same_answers_in_random_batches(acting_runtime, seed):
    rng = np.random.default_rng(seed)
    requests = [random_request(rng) for _ in range(8)]
    alone = [acting_runtime.handle_request(make()) for make in requests]
    for _ in range(6):
        chosen = rng.permutation(8)[: rng.integers(2, 5)]
        answers = acting_runtime.handle_request([requests[index]() for index in chosen])
        for index, answer in zip(chosen, answers, strict=True):
            assert_same_answer(answer, alone[index])


@pytest.mark.slow
def test_the_random_requests_cover_every_way_to_end(acting_runtime):
    answers = []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        answers += [acting_runtime.handle_request(random_request(rng)()) for _ in range(8)]
    assert {answer.finish_reason for answer in answers} == {"stop", "length", "cancelled"}
    assert sum(answer.actions is not None for answer in answers) >= 4
    assert len({len(answer.token_ids) for answer in answers}) > 12


def test_a_step_computes_only_active_sequences(acting_engine, device, monkeypatch):
    sizes = []
    runtime = LLMInferenceRuntime(acting_engine, device, prefix_cache_bytes=0, cuda_graphs=False)
    runner = runtime.pipeline.runner
    step = runner.execute_vanilla_decoding_step

    def watched(embeds, logits, adapters):
        sizes.append(embeds.shape[0])
        step(embeds, logits, adapters)

    monkeypatch.setattr(runner, "execute_vanilla_decoding_step", watched)
    runtime.handle_request(
        [request(max_tokens=n, repetition_penalty=1.3) for n in (3, 10, 6)]
        + [cancelled_at(request(max_tokens=12, repetition_penalty=1.3), "decode", 4)]
    )
    # The prefill samples the first tokens; a sequence ends with each of the steps 2, 5 and 9.
    # On a device with queued steps, the cancellation after step 4 is seen when step 5 is queued.
    fifth = 3 if device.max_queued_steps else 2
    assert sizes == [4, 4, 3, 3, fifth, 1, 1, 1, 1]


def test_trajectories_do_not_wait_for_another_sequence_s_words(acting_runtime):
    seen = []

    def watch(name):
        return lambda progress: seen.append((name, progress.stage))

    acting = request(images=(IMAGE,), max_tokens=30, action_samples=2, on_progress=watch("acting"))
    talking = request("what do you see?", max_tokens=60, repetition_penalty=1.3, on_progress=watch("talking"))
    answers = acting_runtime.handle_request([acting, talking])
    assert answers[0].actions is not None
    assert len(answers[1].token_ids) > len(answers[0].token_ids)
    last_action = max(index for index, entry in enumerate(seen) if entry == ("acting", "action"))
    words_after = seen[last_action:].count(("talking", "decode"))
    assert words_after == len(answers[1].token_ids) - len(answers[0].token_ids) - 1
