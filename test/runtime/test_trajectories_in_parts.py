# SPDX-License-Identifier: Apache-2.0
"""Submitted requests beside one that samples many trajectories."""

import dataclasses

import pytest
from runtime.conftest import triggering

from edgellm_ros.builder import export
from edgellm_ros.diffusion.action_runner import SAMPLES_PER_PART
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures.random_schedules import PlayedTurns
from fixtures.requests_for_tests import IMAGE, assert_same_answer, request

TALKING = request("what do you see?", max_tokens=200, temperature=0.7, seed=1)
FEW = request(images=(IMAGE,), max_tokens=30, action_samples=1, denoise_steps=SAMPLES_PER_PART + 1)
MANY = dataclasses.replace(FEW, action_samples=3 * SAMPLES_PER_PART, noise_seed=4)

on_cpu = pytest.mark.only_on("cpu", reason="counts parts, which have all samples on another device")


def answer(entry):
    return entry.handle.result(0)


def tokens_of(entry) -> int:
    return len(entry.sequence.generated)


def parts_left(entry) -> int:
    sampling = entry.sequence.sampling_actions
    return len(sampling._parts) if sampling is not None else 0


@pytest.fixture
def played(acting_runtime):
    played = PlayedTurns(acting_runtime)
    yield played
    played.turns.fail_all(RuntimeError("the test has failed"))


def sampling(played, one, **options):
    """Submit a request, and take turns until a part of it has been sampled."""
    entry = played.submit(one, **options)
    while entry.sequence.sampling_actions is None:
        played.turn()
    return entry


@on_cpu
def test_others_take_a_step_after_each_part(acting_runtime, played):
    talking, many = played.submit(TALKING), sampling(played, MANY)
    while parts_left(many):
        left, tokens = parts_left(many), tokens_of(talking)
        played.turn()
        assert (parts_left(many), tokens_of(talking)) == (left - 1, tokens + 1)
    played.finish()
    for each in (talking, many):
        assert_same_answer(answer(each), acting_runtime.handle_request(dataclasses.replace(each.request)))


@on_cpu
def test_steps_take_as_long_as_the_part_before_them(acting_runtime, played, monkeypatch):
    def take(seconds, owner, name):
        work = getattr(owner, name)

        def timed(*args):
            played.clock.now += seconds
            work(*args)

        monkeypatch.setattr(owner, name, timed)

    played.turns._others_wait = lambda: False
    take(0.125, acting_runtime.pipeline.runner, "execute_vanilla_decoding_step")
    take(0.5, acting_runtime.pipeline.trajectories, "queue_part")
    many = sampling(played, MANY)
    talking = played.submit(TALKING)
    played.turn()
    before = tokens_of(talking)
    played.turn()
    assert tokens_of(talking) - before == 0.5 / 0.125
    played.finish()
    assert_same_answer(answer(many), acting_runtime.handle_request(MANY))


@on_cpu
def test_requests_of_one_priority_take_turns_with_parts(acting_runtime, played):
    many, few = sampling(played, MANY), sampling(played, FEW)
    left = parts_left(many)
    while not few.handle.done:
        played.turn()
    assert 0 < left - 1 <= parts_left(many) <= left
    played.finish()
    for each in (many, few):
        assert_same_answer(answer(each), acting_runtime.handle_request(dataclasses.replace(each.request)))


@on_cpu
def test_trajectories_wait_for_a_request_of_a_higher_priority(acting_runtime, played):
    many = sampling(played, MANY)
    few = played.submit(FEW, priority=1)
    played.turn()
    left = parts_left(many)
    while not few.handle.done:
        played.turn()
        assert few.handle.done or parts_left(many) == left
    played.finish()
    for each in (many, few):
        assert_same_answer(answer(each), acting_runtime.handle_request(dataclasses.replace(each.request)))


@on_cpu
@pytest.mark.parametrize("waits", [False, True], ids=["sampled", "paused"])
def test_a_request_that_is_cancelled_between_parts_ends_in_the_next_turn(played, waits):
    many = sampling(played, MANY)
    if waits:
        played.submit(TALKING, priority=1)
        played.turn()
    many.cancel()
    played.turn()
    assert answer(many).finish_reason == "cancelled"
    assert answer(many).actions is None
    played.finish()


@on_cpu
def test_a_request_that_loses_its_row_between_parts_samples_again(acting_runtime, played):
    displaced = acting_runtime.scheduling_metrics.displaced
    many = sampling(played, MANY)
    for _ in range(played.pipeline.batch.max_size):
        played.submit(request("stop", max_tokens=9), priority=1)
    played.turn()
    assert acting_runtime.scheduling_metrics.displaced == displaced + 1
    assert many in played.turns.waiting
    played.finish()
    assert_same_answer(answer(many), acting_runtime.handle_request(MANY))


@on_cpu
def test_an_answer_that_fills_the_kv_cache_samples_all_parts_at_once(
    acting_runtime, tiny_checkpoint, words, trigger_index, tmp_path, device
):
    """A step of the others would write to a slot of its row that does not exist."""
    alone = acting_runtime.handle_request(MANY)
    capacity = alone.prompt_tokens + len(alone.token_ids)
    export(tiny_checkpoint, tmp_path / "engine", max_input_len=64, max_kv_cache_capacity=capacity)
    engine = triggering(tmp_path / "engine", tmp_path / "acting", words[trigger_index])
    with LLMInferenceRuntime(engine, device, prefix_cache_bytes=0) as runtime:
        played = PlayedTurns(runtime)
        many = played.submit(MANY)
        others = [played.submit(dataclasses.replace(TALKING)) for _ in range(3)]
        played.turn()
        while not many.handle.done:
            assert len(played.turns.running) == 4  # its row is among those of a step
            played.turn()
        assert answer(many).actions is not None
        played.finish()
        for each in (many, *others):
            assert_same_answer(answer(each), runtime.handle_request(dataclasses.replace(each.request)))
