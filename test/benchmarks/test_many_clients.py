# SPDX-License-Identifier: Apache-2.0
"""The benchmark `many_clients`: when clients ask, and which targets are met."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

from benchmarks.clients import Client, play
from benchmarks.random_arrivals import judged
from edgellm_ros.runtime.request import LLMGenerationRequest, LLMGenerationResponse, Progress


class Answerer:
    """Answers at once, or after some seconds, and remembers when it was asked."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.asked: list[float] = []
        self._seconds = seconds

    def __call__(self, request: LLMGenerationRequest) -> LLMGenerationResponse:
        self.asked.append(time.perf_counter())
        time.sleep(self._seconds)
        for tokens in (1, 2):
            request.on_progress(Progress(stage="decode", step=tokens, text="", tokens=tokens))
        return LLMGenerationResponse(
            text="",
            token_ids=[1, 2],
            finish_reason="length",
            prompt_tokens=1,
            logprobs=None,
            actions=None,
            paths=None,
            noise_seed=0,
            lora="",
            metrics={},
        )


def test_a_client_asks_no_earlier_than_its_gaps():
    answerer, start = Answerer(), time.perf_counter()
    play(answerer, [Client(2, [0.02, 0.03], seed=0)])
    first, second = (asked - start for asked in answerer.asked)
    assert first >= 0.02
    assert second >= 0.05


def test_a_request_that_is_due_during_an_answer_waits_for_it():
    answerer = Answerer(seconds=0.02)
    play(answerer, [Client(2, [0.0, 0.0, 0.0], seed=0)])
    assert all(after - before >= 0.02 for before, after in pairwise(answerer.asked))


def test_a_round_counts_the_tokens_of_all_clients():
    one = play(Answerer(), [Client(2, [0.0, 0.0], seed) for seed in range(3)])
    assert one.figures()["tokens_per_second"] == pytest.approx(3 * 2 * 2 / one.seconds)
    assert len(one.between) == 3 * 2


def test_targets_are_met_up_to_their_limits():
    result = {"ratios": {"tokens_per_second": 5.0, "between_tokens": 1.6}, "long": {"longest": 1.0}}
    assert {name: target["passed"] for name, target in judged(result, users=8).items()} == {
        "tokens_per_second": True,
        "between_tokens": True,
        "longest_gap": True,
    }


def test_targets_are_missed_beyond_their_limits():
    result = {"ratios": {"tokens_per_second": 4.9, "between_tokens": 1.7}, "long": {"longest": 1.01}}
    assert not any(target["passed"] for target in judged(result, users=8).values())


def test_fewer_than_eight_users_have_no_target_for_tokens_per_second():
    result = {"ratios": {"tokens_per_second": 2.0, "between_tokens": 1.2}}
    assert list(judged(result, users=4)) == ["between_tokens"]
