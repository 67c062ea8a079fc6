# SPDX-License-Identifier: Apache-2.0
"""With a grammar, trees of drafted tokens give the answers of vanilla decoding.

A drafter of the test proposes random trees, in which it places tokens of the known answer.
"""

import dataclasses

import numpy as np
import pytest

from doubles.deferred_runtime import WatchedDevice, queueing
from doubles.scripted_drafter import ScriptedTrees, draft_by_script
from edgellm_ros.runtime.decoding.speculative.drafting_config import SpecDecodeDraftingConfig
from edgellm_ros.runtime.grammar.grammar import GrammarMatcher
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures.answers_of_grammars import GRAMMARS, PLAN, WORD, check, random_requests
from fixtures.draws import draws
from fixtures.requests_for_tests import assert_same_with_drafting, request

LOOKUP = SpecDecodeDraftingConfig(1, 7, 8, "lookup", falls_back=False)
TREES = ScriptedTrees(1, 23, 24, "lookup", falls_back=False)
TALKING = {"prompt": "what do you see?", "repetition_penalty": 1.3, "max_tokens": 30}


@pytest.fixture(scope="module")
def drafting(draft_engine, device):
    with LLMInferenceRuntime(draft_engine, device, prefix_cache_bytes=0, drafting=TREES) as runtime:
        yield runtime


@pytest.fixture
def answers(drafting, runtime):
    """A function that answers a batch without and with random trees."""

    def run(batch, steps=4, size=12, seed=0, right=0.8):
        expected = runtime.handle_request(batch)
        known = {id(one): answer.token_ids for one, answer in zip(batch, expected, strict=True)}
        drafter = draft_by_script(drafting, steps, size, seed, right)
        drafter.answers = lambda one: known[id(one)]
        return drafting.handle_request(batch), expected

    return run


def assert_all_same(pair) -> None:
    for one, other in zip(*pair, strict=True):
        assert_same_with_drafting(one, other)
        assert one.grammar_complete == other.grammar_complete


def random_grammars_with_trees(answers, seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    requests = random_requests(seed, count)
    ended = 0
    for start in range(0, count, 4):
        part = requests[start : start + 4]
        shape = int(rng.integers(1, 8)), int(rng.integers(2, 25))
        pair = answers(part, *shape, seed, rng.choice([0.5, 0.9, 1.0]))
        assert_all_same(pair)
        ended += sum(map(check, part, pair[0]))
    assert ended > 0.7 * count


@pytest.mark.parametrize("seed", range(3))
def test_random_trees_with_random_grammars(answers, seed):
    random_grammars_with_trees(answers, seed, 8)


@pytest.mark.slow
@pytest.mark.only_on("cpu", "cuda", reason="the test above has random grammars for every device")
@pytest.mark.parametrize("seed", range(100, draws(104, 110)))
def test_random_trees_with_many_random_grammars(answers, seed):
    random_grammars_with_trees(answers, seed, 50)


def test_a_right_draft_yields_all_its_tokens(answers, drafting):
    before = dataclasses.replace(drafting.spec_decode_generation_metrics)
    pair = answers([request(regex="[a-z]{31}", max_tokens=31)], steps=5, size=24, right=1.0)
    assert_all_same(pair)
    found = drafting.spec_decode_generation_metrics
    assert found.generated_tokens - before.generated_tokens == 30  # and the prefill's
    assert found.total_runs - before.total_runs < 15
    assert found.vanilla_runs == before.vanilla_runs


def test_a_token_that_the_grammar_forbids_is_not_accepted(drafting, runtime):
    """The drafter proposes the answer of the request without its grammar."""
    free = runtime.handle_request(request("stop", max_tokens=30, repetition_penalty=1.3))
    one = request("stop", regex="[a-z ]{31}", max_tokens=30, repetition_penalty=1.3)
    expected = runtime.handle_request(one)
    assert free.token_ids != expected.token_ids
    drafter = draft_by_script(drafting, 5, 24, right=1.0)
    drafter.answers = lambda one: free.token_ids
    assert_same_with_drafting(drafting.handle_request(one), expected)


def test_an_answer_ends_in_a_tree_where_the_grammar_becomes_too_complex(answers, monkeypatch):
    """A token of the grammar leads to a state that the library gives up on."""
    monkeypatch.setattr(GrammarMatcher, "after", lambda matcher, token: None)
    (one,), (expected,) = answers([request(regex="[a-z]{31}", max_tokens=31)], steps=5, size=24, right=1.0)
    assert expected.text.startswith(one.text)
    assert (one.finish_reason, one.grammar_complete) == ("stop", False)


def test_a_batch_of_requests_with_and_without_grammars(answers, drafting):
    batch = [request(**rules, seed=5) for rules in GRAMMARS]
    rounds = drafting.spec_decode_generation_metrics.total_runs
    assert_all_same(answers([*batch, request(**TALKING, logprobs=2)], steps=5, size=20))
    assert drafting.spec_decode_generation_metrics.total_runs > rounds


def test_log_probabilities_are_those_of_the_allowed_tokens(answers):
    pair = answers([request(regex="[ab]{9}", logprobs=5, temperature=1.0)], right=1.0)
    assert_all_same(pair)
    assert {len(entries) for entries in pair[0][0].logprobs[:9]} == {2}


def test_a_request_may_turn_drafting_off_beside_another_one(answers):
    assert_all_same(answers([request(**WORD, disable_spec_decode=True), request(**PLAN, seed=3)]))


@pytest.mark.parametrize("seed", range(3))
def test_a_stop_token_in_the_middle_of_a_tree_ends_the_answer(answers, seed):
    """A choice may end, or go on."""
    one = request(choices=("left", "left turn", "left turn left"), temperature=2.0, seed=seed)
    assert_all_same(answers([one], steps=7, size=24, right=1.0))


def test_an_answer_fills_the_kv_cache_to_its_last_slot(answers, drafting):
    pair = answers([request("abc " * 60, regex="[a-z ]*", max_tokens=1000)], steps=6, size=24, right=1.0)
    assert_all_same(pair)
    answer, capacity = pair[0][0], drafting.config.max_kv_cache_capacity
    assert answer.finish_reason == "stop" or answer.prompt_tokens + len(answer.token_ids) == capacity


@pytest.mark.slow
def test_draft_heads_and_prompt_lookup(draft_engine, device):
    options = {"prefix_cache_bytes": 0, "lora_dirs": {}}
    batch = [request(**rules, seed=5) for rules in GRAMMARS]
    batch.append(request("abc abc abc", regex="[a-c ]{20}", max_tokens=25))
    with LLMInferenceRuntime(draft_engine, device, **options) as plain:
        expected = plain.handle_request(batch)
    for drafting in (LOOKUP, SpecDecodeDraftingConfig(3, 3, 10, falls_back=False)):
        with LLMInferenceRuntime(draft_engine, device, drafting=drafting, **options) as drafted:
            assert_all_same((drafted.handle_request(batch), expected))
            metrics = drafted.spec_decode_generation_metrics
            assert metrics.total_runs > 10
            assert metrics.vanilla_runs == 0


@pytest.mark.only_on("cpu", reason="brings its own device")
def test_masks_are_computed_while_the_device_verifies(draft_engine, monkeypatch):
    waiting = []
    to_mask = GrammarMatcher.to_mask
    one = request(regex="[a-z]{20}", max_tokens=20)
    with LLMInferenceRuntime(draft_engine, "cpu", prefix_cache_bytes=0) as plain:
        expected = plain.handle_request(one)
    with (
        queueing(),
        LLMInferenceRuntime(draft_engine, WatchedDevice(), prefix_cache_bytes=0, drafting=LOOKUP) as runtime,
    ):
        device = runtime.pipeline.device

        def watch(*arguments):
            waiting.append(device.waiting())
            to_mask(*arguments)

        monkeypatch.setattr(GrammarMatcher, "to_mask", watch)
        assert_same_with_drafting(runtime.handle_request(one), expected)
    assert waiting
    assert all(waiting)


@pytest.mark.only_on("cpu", reason="brings its own device")
def test_rounds_are_recorded_up_to_the_logits_when_they_first_run(draft_engine):
    one = request(regex="[a-z]{20}", max_tokens=20)
    options = {"prefix_cache_bytes": 0, "lora_dirs": {}}
    with LLMInferenceRuntime(draft_engine, "cpu", **options) as plain:
        expected = plain.handle_request(one)
    options |= {"drafting": LOOKUP}
    with queueing(), LLMInferenceRuntime(draft_engine, WatchedDevice(), **options) as runtime:
        assert runtime.capture_decoding_cuda_graph()
        calls, metrics = runtime.pipeline.device.calls, runtime.spec_decode_generation_metrics
        calls.clear()
        assert_same_with_drafting(runtime.handle_request(one), expected)
        rounds = 2 * (metrics.total_runs - 1)
        assert (calls["launch"], calls["capture"]) == (
            2 + rounds,
            2,
        )  # prefill and first token are graphs already
        assert metrics.vanilla_runs == 0


@pytest.mark.only_on("cpu", reason="brings its own device")
def test_a_batch_without_a_grammar_copies_no_trees(draft_engine):
    with queueing(), LLMInferenceRuntime(draft_engine, WatchedDevice(), drafting=LOOKUP) as runtime:
        calls = runtime.pipeline.device.calls
        calls.clear()
        runtime.handle_request(request(**TALKING))
        metrics = runtime.spec_decode_generation_metrics
        assert calls["copy_to_host"] == metrics.total_runs + metrics.vanilla_runs + 1
