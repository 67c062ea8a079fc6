# SPDX-License-Identifier: Apache-2.0
"""Chains whose length changes from round to round, on a CPU."""

from __future__ import annotations

from random import Random

import pytest

from doubles.scripted_drafter import ScriptedDrafter
from edgellm_ros.builder import export
from edgellm_ros.runtime.decoding.speculative.drafting_config import SpecDecodeDraftingConfig
from edgellm_ros.runtime.decoding.speculative.step_sizes import StepSizes
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures import dflash_checkpoints, mtp_checkpoints
from fixtures.drafted_chains import BATCH, assert_all_same
from fixtures.head_reference import assert_scores, reference_of, watched_drafts
from fixtures.random_chains import LIMITS
from fixtures.requests_for_tests import assert_same_with_drafting, request

pytestmark = pytest.mark.only_on("cpu", reason="rounds of other devices have one size")
ALONE = [[one] for one in BATCH]


def draft_right_tokens(runtime, requests, answers, right: float) -> None:
    """Replace a share of the drafted tokens by those of the answers."""
    known = {one.prompt: answer.token_ids for one, answer in zip(requests, answers, strict=True)}
    pipeline = runtime.pipeline
    cache, last_tokens = pipeline.runner.kv_cache, pipeline.sampling.last_tokens
    inner = pipeline.drafter.drafter
    drafter = ScriptedDrafter(inner, pipeline.device, cache, last_tokens, seed=1, right=right, back=1)
    drafter.answers = lambda one: known[one.prompt]
    pipeline.drafter.drafter = drafter


@pytest.fixture
def random_sizes(monkeypatch) -> list[int]:
    """Steps of random sizes; returns the list of their sizes."""
    random, chosen = Random(0), []

    def next_size(self, room: int) -> int:
        size = random.choice([size for size in self._sizes if size <= room])
        chosen.append(size)
        self._queued.append(size)
        return size

    monkeypatch.setattr(StepSizes, "next_size", next_size)
    return chosen


@pytest.fixture(scope="module", params=["eagle", "lookup", "mtp", "dflash"])
def strategy(request):
    return request.param


@pytest.fixture(scope="module")
def engine(strategy, request, tmp_path_factory):
    if strategy in ("eagle", "lookup"):
        return request.getfixturevalue("draft_engine")
    folder, fixtures = (
        tmp_path_factory.mktemp("engine"),
        {"mtp": mtp_checkpoints, "dflash": dflash_checkpoints},
    )
    write = next(iter(fixtures[strategy].WRITERS.values()))
    export(write(folder / "checkpoint", 2), folder / "engine", **LIMITS)
    return folder / "engine"


@pytest.fixture(scope="module")
def plain(engine):
    with LLMInferenceRuntime(engine, prefix_cache_bytes=0, drafting=None) as runtime:
        yield runtime


@pytest.mark.parametrize("batches", [[BATCH], ALONE], ids=["one batch", "alone"])
def test_answers_are_those_of_vanilla_decoding(engine, strategy, plain, random_sizes, batches):
    config = SpecDecodeDraftingConfig(1, 7, 8, strategy)
    for batch in batches:
        expected = plain.handle_request(batch)
        with LLMInferenceRuntime(engine, prefix_cache_bytes=0, drafting=config) as runtime:
            draft_right_tokens(runtime, batch, expected, right=0.9)
            assert_all_same(runtime.handle_request(batch), expected)
            assert not runtime.pipeline.drafter.failed
    assert {1, 2, 4, 8} <= set(random_sizes)


def test_candidates_are_those_of_a_head_that_sees_the_whole_text(draft_engine, random_sizes):
    config = SpecDecodeDraftingConfig(1, 7, 8)
    one = request("what do you see?", max_tokens=60, repetition_penalty=1.3)
    with (
        reference_of(draft_engine, "cpu", config) as reference,
        LLMInferenceRuntime(draft_engine, prefix_cache_bytes=0, drafting=config) as runtime,
    ):
        recorded = reference(one)
        draft_right_tokens(runtime, [one], [runtime.handle_request(one)], right=0.9)
        with watched_drafts(runtime) as drafts:
            runtime.handle_request(one)
        assert {len(draft.table["tokens"]) for draft in drafts} == {2, 4, 8}
        for draft in drafts:
            assert_scores(draft, *recorded)


def test_a_head_drafts_no_level_that_a_short_chain_has_no_room_for(draft_engine, monkeypatch):
    config = SpecDecodeDraftingConfig(1, 7, 8)
    levels: list[int] = []
    with LLMInferenceRuntime(draft_engine, prefix_cache_bytes=0, drafting=config) as runtime:
        head = runtime.pipeline.drafter.drafter._head
        execute = head.execute_level

        def count(table, level, **tensors):
            levels.append(level)
            return execute(table, level, **tensors)

        monkeypatch.setattr(head, "execute_level", count)
        monkeypatch.setattr(StepSizes, "next_size", lambda self, room: self._queued.append(4) or 4)
        runtime.handle_request(request("stop", max_tokens=12))
    assert set(levels) == {1, 2}


@pytest.mark.parametrize(("right", "size_s", "expected"), [(1.0, 0.1, 8), (0.5, 0.1, 4), (0.5, 2.0, 1)])
def test_steps_have_the_size_that_pays(draft_engine, monkeypatch, right, size_s, expected):
    """With a share of the guesses right; each token of a size takes `size_s` more.

    Tokens a second with half of the guesses right and 0.1: 1.25, 1.34 and 1.11 for sizes 2, 4 and 8.
    """
    config = SpecDecodeDraftingConfig(1, 7, 8)
    one = request("what do you see?", max_tokens=100, repetition_penalty=1.3)
    with LLMInferenceRuntime(draft_engine, prefix_cache_bytes=0, drafting=None) as runtime:
        answer = runtime.handle_request(one)
    with LLMInferenceRuntime(draft_engine, prefix_cache_bytes=0, drafting=config) as runtime:
        draft_right_tokens(runtime, [one], [answer], right)
        now, sizes = [0.0], []
        step_sizes = runtime.pipeline.method._step_sizes_by_grammar[False]
        monkeypatch.setattr(step_sizes, "_clock", lambda: now[0])
        choose = step_sizes.next_size

        def next_size(room: int) -> int:
            sizes.append(choose(room))
            now[0] += 1 + size_s * (sizes[-1] - 1)
            return sizes[-1]

        monkeypatch.setattr(step_sizes, "next_size", next_size)
        for _ in range(5):
            assert_same_with_drafting(runtime.handle_request(one), answer)
    later = sizes[len(sizes) // 2 :]
    assert max(set(later), key=later.count) == expected
