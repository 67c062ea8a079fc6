# SPDX-License-Identifier: Apache-2.0
"""Answers with trees of drafted tokens are those of vanilla decoding.

A drafter of the test proposes random trees, in which it places tokens of the known answer.
"""

import dataclasses
import logging

import numpy as np
import pytest

from doubles.deferred_runtime import WatchedDevice, queueing
from doubles.scripted_drafter import ScriptedTrees, draft_by_script
from edgellm_ros.engine.errors import DeviceLostError, EngineError
from edgellm_ros.runtime.decoding.speculative import tree_decoding
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures.random_requests import cancelled_at, random_request
from fixtures.requests_for_tests import IMAGE, SOUND, assert_close, assert_same_with_drafting, request

TREES = ScriptedTrees(1, 23, 24, "lookup", falls_back=False)
TALKING = {"prompt": "what do you see?", "repetition_penalty": 1.3}
DRAWING = {"prompt": "stop", "temperature": 1.2, "seed": 3, "repetition_penalty": 1.2}
FILLING = {"prompt": "abc " * 60, "max_tokens": 1000}  # an answer without end
ACTING = {"images": (IMAGE,), "action_samples": 2}


@pytest.fixture(scope="module")
def drafting(acting_draft_engine, device):
    with LLMInferenceRuntime(acting_draft_engine, device, prefix_cache_bytes=0, drafting=TREES) as runtime:
        yield runtime


@pytest.fixture
def answers(drafting, acting_runtime):
    """Function that answers a batch with random trees and without.

    `steps` and `size` are the shape of the trees.
    """

    def run(batch, steps=4, size=12, seed=0, right=0.8):
        expected = [acting_runtime.handle_request(one) for one in batch]
        known = {id(one): answer.token_ids for one, answer in zip(batch, expected, strict=True)}
        drafter = draft_by_script(drafting, steps, size, seed, right)
        drafter.answers = lambda one: known[id(one)]
        return drafting.handle_request(batch), expected

    return run


def assert_all_same(pair) -> None:
    for one, other in zip(*pair, strict=True):
        assert_same_with_drafting(one, other)


@pytest.mark.parametrize("seed", range(6))
def test_random_trees_in_random_batches(answers, seed):
    rng = np.random.default_rng(seed)
    batch = [random_request(rng)() for _ in range(rng.integers(1, 5))]
    batch = [dataclasses.replace(one, on_progress=None, cancel=None) for one in batch]
    size = int(rng.integers(2, 25))
    assert_all_same(answers(batch, int(rng.integers(1, 8)), size, seed, rng.choice([0.0, 0.5, 0.9, 1.0])))


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 9, 30])
def test_limits_in_a_batch_whose_sequences_leave_one_by_one(answers, max_tokens):
    assert_all_same(answers([request(**one, max_tokens=max_tokens) for one in (TALKING, DRAWING, ACTING)]))


def test_a_right_draft_yields_all_its_tokens(answers, drafting):
    before = dataclasses.replace(drafting.spec_decode_generation_metrics)
    assert_all_same(answers([request(**TALKING, max_tokens=31)], steps=5, size=24, right=1.0))
    found = drafting.spec_decode_generation_metrics
    assert found.generated_tokens - before.generated_tokens == 30  # and the prefill's
    assert found.total_runs - before.total_runs < 15


def test_a_wrong_draft_yields_one_token_per_round(answers, drafting):
    before = dataclasses.replace(drafting.spec_decode_generation_metrics)
    assert_all_same(answers([request(**TALKING, max_tokens=11)], right=0.0))
    assert drafting.spec_decode_generation_metrics.total_runs - before.total_runs == 10


def test_log_probabilities_are_those_of_the_path(answers):
    assert_all_same(answers([request(**TALKING, max_tokens=30, logprobs=3), request(**DRAWING, logprobs=1)]))


def test_a_stop_string_in_the_middle_of_a_round_ends_the_text(answers, acting_runtime):
    whole = acting_runtime.handle_request(request(**TALKING, max_tokens=30)).text
    assert_all_same(answers([request(**TALKING, max_tokens=30, stop=(whole[9:11],)), request(**DRAWING)]))


def test_the_action_head_reads_the_rows_of_accepted_nodes(answers, drafting, trigger_index):
    lengths, queue = [], drafting.pipeline.action.queue_part

    def watched(cache, *rest):
        lengths.extend(drafting.pipeline.device.download(cache.length).tolist())
        return queue(cache, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafting.pipeline.action, "queue_part", watched)
        found, expected = answers([request(**ACTING, max_tokens=30)], steps=7, size=24, right=1.0)
    assert found[0].actions is not None
    assert lengths == [found[0].prompt_tokens + trigger_index + 1]
    assert_close(found[0].actions, expected[0].actions)
    assert_close(found[0].paths, expected[0].paths)


def test_images_and_sounds_in_the_prompt(answers):
    assert_all_same(answers([request(images=(IMAGE,), audio=(SOUND,), max_tokens=25)]))


def test_an_answer_fills_the_kv_cache_to_its_last_slot(answers, drafting):
    """Trees get smaller where slots get fewer; the last tokens are of vanilla steps."""
    runner, sizes = drafting.pipeline.runner, []
    execute = runner.execute_tree_decoding_step

    def watched(embeds, *rest):
        sizes.append(embeds.shape[1])
        execute(embeds, *rest)

    vanilla = drafting.spec_decode_generation_metrics.vanilla_runs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "execute_tree_decoding_step", watched)
        pair = answers([request(**FILLING)], steps=6, size=24, right=0.0)
    assert_all_same(pair)
    capacity = drafting.config.max_kv_cache_capacity
    assert pair[0][0].prompt_tokens + len(pair[0][0].token_ids) == capacity
    assert set(sizes) == {24, 12, 6, 3}
    assert drafting.spec_decode_generation_metrics.vanilla_runs > vanilla


def test_progress_grows_and_is_a_prefix_of_the_text(answers):
    texts, tokens = [], []

    def on_progress(progress):
        texts.append(progress.text)
        tokens.append(progress.tokens)

    found, _ = answers([request(**TALKING, max_tokens=30, on_progress=on_progress)], right=1.0)
    assert all(found[0].text.startswith(text) for text in texts)
    rounds = tokens[tokens.index(30) + 1 :]  # after those of the answer without drafting
    assert len(rounds) < 20
    assert rounds == sorted(rounds)
    assert rounds[-1] == 30


def test_cancelling_between_rounds_leaves_the_others(answers, acting_runtime):
    cancelled = request(**TALKING, max_tokens=30)
    other = request(**DRAWING, max_tokens=30)
    expected = acting_runtime.handle_request(other)
    (first, second), _ = answers([cancelled_at(cancelled, "decode", 3), other], right=0.5)
    assert first.finish_reason == "cancelled"
    assert_same_with_drafting(second, expected)


def test_a_request_turns_drafting_off_for_itself_only(answers, drafting):
    before, progress = dataclasses.replace(drafting.spec_decode_generation_metrics), []
    alone = request(**DRAWING, max_tokens=12, disable_spec_decode=True, on_progress=progress.append)
    assert_all_same(answers([request(**TALKING, max_tokens=31), alone], steps=5, size=24, right=1.0))
    found = drafting.spec_decode_generation_metrics
    assert found.generated_tokens - before.generated_tokens == 30
    assert found.verified_trees - before.verified_trees < 15
    steps = [one.tokens for one in progress if one.stage == "decode"]
    assert steps == [*range(1, 13)] * 2, "one token per step, without drafting and in rounds"


def test_a_batch_whose_requests_all_turn_drafting_off_takes_vanilla_steps(answers, drafting):
    runs = drafting.spec_decode_generation_metrics.total_runs
    assert_all_same(answers([request(**one, disable_spec_decode=True) for one in (TALKING, DRAWING)]))
    assert drafting.spec_decode_generation_metrics.total_runs == runs


def test_a_failing_drafter_ends_in_vanilla_decoding(drafting, acting_runtime, caplog):
    def fails(tree):
        raise EngineError("no more drafts")

    with caplog.at_level(logging.WARNING):
        draft_by_script(drafting, 4, 12).propose = fails
        for _ in range(2):
            answer = drafting.handle_request(request(**TALKING, max_tokens=9))
            assert_same_with_drafting(answer, acting_runtime.handle_request(request(**TALKING, max_tokens=9)))
    assert [record.getMessage() for record in caplog.records] == [
        "drafting (lookup) has failed, decoding goes on without it: no more drafts"
    ]


def test_a_lost_device_is_raised(drafting):
    def lost(tree):
        raise DeviceLostError("lost")

    draft_by_script(drafting, 4, 12).propose = lost
    with pytest.raises(DeviceLostError, match="lost"):
        drafting.handle_request(request(**TALKING, max_tokens=9))


@pytest.mark.only_on("cpu", reason="brings its own device")
def test_rounds_are_queued_ahead_on_an_asynchronous_device(acting_draft_engine, acting_runtime, monkeypatch):
    monkeypatch.setattr(tree_decoding, "STEPS_ALONE", 0)  # the answers are short
    rng = np.random.default_rng(3)
    with (
        queueing(),
        LLMInferenceRuntime(
            acting_draft_engine, WatchedDevice(), prefix_cache_bytes=0, drafting=TREES
        ) as runtime,
    ):
        device = runtime.pipeline.device
        for _ in range(4):
            batch = [random_request(rng)() for _ in range(int(rng.integers(1, 5)))]
            batch = [dataclasses.replace(one, on_progress=None, cancel=None) for one in batch]
            device.host_copies = device.most_host_copies = 0
            found = runtime.handle_request(batch)
            for one, other in zip(found, map(acting_runtime.handle_request, batch), strict=True):
                assert_same_with_drafting(one, other)
        assert device.most_host_copies > 1
        whole = runtime.handle_request(request(**FILLING))
        assert whole.prompt_tokens + len(whole.token_ids) == runtime.config.max_kv_cache_capacity
