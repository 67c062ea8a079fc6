# SPDX-License-Identifier: Apache-2.0
"""Turns of submitted requests: parts of prompts, priorities, waiting, failures."""

import dataclasses

import pytest

from edgellm_ros.builder import export
from edgellm_ros.engine.errors import DeviceLostError, EngineError
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.scheduling import entry, rows
from fixtures.answers_of_grammars import SCHEMA
from fixtures.hybrid_checkpoints import write_qwen3_5_checkpoint
from fixtures.random_schedules import PlayedTurns
from fixtures.requests_for_tests import IMAGE, assert_same_answer, request

LONG_PROMPT = "go to the red box and then turn left at the door " * 5
TALKING = request("what do you see?", max_tokens=40, temperature=0.7, seed=1)
DRIVING = request(images=(IMAGE,), max_tokens=6)


def answer(entry):
    return entry.handle.result(0)


@pytest.fixture
def played(runtime):
    played = PlayedTurns(runtime)
    yield played
    played.turns.fail_all(RuntimeError("the test has failed"))


def tokens_of(entry) -> int:
    return len(entry.sequence.generated)


@pytest.mark.only_on("cpu", reason="counts steps, of which another device has one queued")
def test_a_long_prompt_is_computed_between_steps_of_the_others(runtime, played, monkeypatch):
    running, long = played.submit(TALKING), request(LONG_PROMPT, max_tokens=3)
    played.turn()
    monkeypatch.setattr(rows, "PART_TOKENS", 16)
    joining = played.submit(long)
    counts = []
    while not tokens_of(joining):
        before = tokens_of(running), joining.sequence.kv_length
        played.turn()
        counts.append((tokens_of(running) - before[0], joining.sequence.kv_length - before[1]))
    parts = -(-len(joining.sequence.token_ids) // 16)
    assert len(counts) == parts > 4
    assert all(steps == 1 for steps, _ in counts)
    assert all(part <= 16 + 1 for _, part in counts)  # and a step with its first token
    played.finish()
    assert_same_answer(answer(running), runtime.handle_request(TALKING))
    assert_same_answer(answer(joining), runtime.handle_request(long))


def test_an_image_is_not_encoded_again_beside_an_answer_about_it(runtime, tiny_engine, device):
    asked = [request(text, images=(IMAGE,), max_tokens=20) for text in ("go on", "what do you see?", "stop")]
    with LLMInferenceRuntime(tiny_engine, device) as caching:
        played = PlayedTurns(caching)
        first = played.submit(asked[0])
        played.turn()
        others = [played.submit(each) for each in asked[1:]]
        while played.turns.waiting:
            played.turn()
        assert not first.handle.done
        assert caching.multimodal_metrics.total_images == 1
        assert all(each.sequence.reused_tokens > first.sequence.image_tokens[0] for each in others)
        played.finish()
        for answered, each in zip((first, *others), asked, strict=True):
            assert_same_answer(answer(answered), runtime.handle_request(each))


@pytest.mark.only_on("cpu", reason="elsewhere the next one begins behind the step of the turn")
@pytest.mark.parametrize(("short_parts", "turns"), [(True, 1), (False, 3)])
def test_where_short_prompts_take_long_a_turn_computes_one(runtime, played, monkeypatch, short_parts, turns):
    monkeypatch.setattr(type(runtime.pipeline.device), "short_parts", short_parts)
    asked = [request(prompt, max_tokens=5) for prompt in ("stop", "go to the red box", "where is it?")]
    submitted = [played.submit(each) for each in asked]
    for begun in range(1, turns + 1):
        played.turn()
        assert len(played.turns.waiting) == (len(asked) - begun if turns > 1 else 0)
    played.finish()
    for answered, each in zip(submitted, asked, strict=True):
        assert_same_answer(answer(answered), runtime.handle_request(each))


@pytest.mark.only_on("cpu", reason="elsewhere it begins behind the step of the turn")
def test_a_long_prompt_does_not_begin_in_the_rest_of_a_turn(runtime, played):
    short = played.submit(request("stop", max_tokens=9))
    long = played.submit(request(LONG_PROMPT, max_tokens=3))
    assert len(short.sequence.token_ids) + len(long.sequence.token_ids) > rows.PART_TOKENS
    played.turn()
    assert (tokens_of(short) > 0, played.turns.waiting) == (True, [long])
    played.turn()
    assert played.turns.running == [short, long]
    played.finish()
    assert_same_answer(answer(long), runtime.handle_request(request(LONG_PROMPT, max_tokens=3)))


@pytest.fixture(params=["eagle", "hybrid"])
def other_engine(request, tmp_path):
    """An engine with a draft head, and a hybrid one."""
    if request.param == "eagle":
        return request.getfixturevalue("acting_draft_engine")
    export(write_qwen3_5_checkpoint(tmp_path / "checkpoint", 0), tmp_path / "engine")
    return tmp_path / "engine"


@pytest.mark.only_on("cpu", reason="counts steps, of which another device has one queued")
def test_draft_heads_and_recurrent_states_let_others_step_and_pause(other_engine, device, monkeypatch):
    with LLMInferenceRuntime(other_engine, device) as runtime:
        played = PlayedTurns(runtime)
        running = played.submit(request("what do you see?", max_tokens=90))
        played.turn()
        monkeypatch.setattr(rows, "PART_TOKENS", 16)
        joining = played.submit(request(LONG_PROMPT, max_tokens=3))
        parts = 0
        while not tokens_of(joining):
            before = tokens_of(running), joining.sequence.kv_length
            played.turn()
            assert tokens_of(running) > before[0]
            assert joining.sequence.kv_length - before[1] <= 16 + runtime.pipeline.method.tokens_per_step
            parts += 1
        new_tokens = len(joining.sequence.token_ids) - joining.sequence.reused_tokens  # same beginnings
        assert parts == -(-new_tokens // 16)
        urgent, before = played.submit(request("go", max_tokens=9), priority=5), tokens_of(running)
        while not urgent.handle.done:
            assert tokens_of(running) == before
            played.turn()
        assert answer(urgent).finish_reason == "length"
        played.finish()


@pytest.mark.only_on("cpu", reason="counts steps, of which another device has one queued")
def test_several_short_prompts_begin_in_one_turn(runtime, played):
    entries = [played.submit(request("stop", max_tokens=9)) for _ in range(6)]
    played.turn()
    assert [tokens_of(entry) for entry in entries] == [2] * 4 + [0] * 2
    assert (runtime.scheduling_metrics.running, runtime.scheduling_metrics.waiting) == (4, 2)
    played.finish()


def test_a_priority_that_is_raised_takes_the_next_steps(runtime, played):
    asked = TALKING, request("stop", max_tokens=30)
    low, raised = (played.submit(each) for each in asked)
    played.turn()
    raised.handle.raise_priority(5)
    raised.handle.raise_priority(2)  # lower: without effect
    before = tokens_of(low)
    while not raised.handle.done:
        played.turn()
        assert raised.priority == 5
        assert tokens_of(low) == before
    played.finish()
    for answered, each in zip((low, raised), asked, strict=True):
        assert_same_answer(answer(answered), runtime.handle_request(each))


def test_a_higher_priority_takes_the_next_steps(runtime, played):
    low = [played.submit(TALKING), played.submit(request("stop", max_tokens=30))]
    while not all(map(tokens_of, low)):
        played.turn()
    counts = list(map(tokens_of, low))
    driving = played.submit(DRIVING, priority=5)
    while not driving.handle.done:
        assert list(map(tokens_of, low)) == counts
        played.turn()
    played.finish()
    for each in (*low, driving):
        assert_same_answer(answer(each), runtime.handle_request(dataclasses.replace(each.request)))
    assert [piece.token_ids for piece in low[0].handle] == [(token,) for token in answer(low[0]).token_ids]


def test_a_request_of_a_low_priority_does_not_wait_for_ever(runtime, played):
    low, high = played.submit(request("stop", max_tokens=8)), played.submit(DRIVING, priority=3)
    turns = 0
    while not low.handle.done:
        if high.handle.done:
            high = played.submit(DRIVING, priority=3)
        played.turn(seconds=0.5)
        turns += 1
        assert turns < 2 * 3 * entry.AGING_S / 0.5 + 20
    assert turns * 0.5 >= 2 * entry.AGING_S
    played.finish()


@pytest.mark.parametrize("answering", [False, True], ids=["prompt", "answer"])
def test_a_request_that_waits_with_its_row_is_not_forgotten(runtime, played, monkeypatch, answering):
    monkeypatch.setattr(rows, "PART_TOKENS", 40)  # a prompt of the others takes a turn
    low = played.submit(request(LONG_PROMPT, max_tokens=40))
    played.turn()
    while answering and not tokens_of(low):
        played.turn()
    before = low.sequence.kv_length
    turns = 0
    while low.sequence.kv_length == before:
        if len(played.turns.waiting) < 3:
            played.submit(request("stop", max_tokens=3 if answering else 1), priority=3)
        played.turn(seconds=0.5)
        turns += 1
        assert turns < 2 * 3 * entry.AGING_S / 0.5
    assert turns * 0.5 >= entry.AGING_S
    played.finish()
    assert_same_answer(answer(low), runtime.handle_request(request(LONG_PROMPT, max_tokens=40)))


def test_a_prompt_that_is_not_complete_may_lose_its_row(runtime, played, monkeypatch):
    monkeypatch.setattr(rows, "PART_TOKENS", 64)
    for _ in range(3):
        played.submit(TALKING, priority=1)
        played.turn()
    long = played.submit(request(LONG_PROMPT, max_tokens=3), priority=1)
    played.turn()
    assert long.prompts is not None
    driving = played.submit(DRIVING, priority=2)
    while driving in played.turns.waiting:
        played.turn()
    assert played.turns.waiting == [long]
    played.finish()
    for each in (long, driving):
        assert_same_answer(answer(each), runtime.handle_request(dataclasses.replace(each.request)))


@pytest.fixture
def crowd(played):
    """Requests of priority 0 that take all rows, after some steps."""
    rules = {"temperature": 0.9, "logprobs": 2, "max_tokens": 60}
    grammar = request("go", json_schema=SCHEMA, **{**rules, "max_tokens": 200})
    others = [request(text, seed=seed, stop=("zz",), **rules) for seed, text in enumerate(("stop", "go", ""))]
    entries = [played.submit(each) for each in (*others, grammar)]
    for _ in range(8):
        played.turn()
    assert played.turns.running == entries
    return entries


def test_a_request_without_a_row_displaces_one_of_a_lower_priority(runtime, played, crowd):
    displaced = runtime.scheduling_metrics.displaced
    driving = played.submit(DRIVING, priority=1)
    played.turn()
    assert runtime.scheduling_metrics.displaced == displaced + 1
    assert played.turns.waiting == crowd[3:]
    assert tokens_of(driving) > 0
    second = played.submit(DRIVING, priority=1)  # takes the next row
    played.turn()
    assert played.turns.waiting == crowd[:1:-1]
    played.finish()
    for each in (*crowd, driving, second):
        assert_same_answer(answer(each), runtime.handle_request(dataclasses.replace(each.request)))
        pieces = [token for piece in each.handle for token in piece.token_ids]
        assert pieces == answer(each).token_ids


def test_a_displaced_request_that_is_cancelled_keeps_what_it_had(played, crowd):
    before = list(crowd[3].sequence.generated)
    played.submit(DRIVING, priority=1)
    played.turn()
    crowd[3].cancel()
    played.turn()
    assert crowd[3].handle.done
    response = answer(crowd[3])
    assert (response.finish_reason, response.token_ids) == ("cancelled", before)
    played.finish()


def test_a_request_displaced_at_the_token_that_triggers_actions_begins_again(runtime):
    sequence = runtime.pipeline.prepare_one(TALKING, 0)
    sequence.finish_reason, sequence._trigger_row_pending = "stop", True
    again = runtime.pipeline.preparer.prepare_again(sequence)
    assert (again.finish_reason, again.tokens_left) == ("", TALKING.sampling.max_tokens)


def test_a_request_is_displaced_once(runtime, played, crowd):
    displaced = runtime.scheduling_metrics.displaced
    for _ in range(12):
        played.submit(request("stop", max_tokens=2), priority=1)
        played.turn()
    played.finish()
    assert runtime.scheduling_metrics.displaced - displaced <= len(crowd)


def take_a_row_again(played, crowd, times: int) -> None:
    """Displace the last request of a crowd, each time after it has a row again."""
    for _ in range(times):
        driving = played.submit(request("stop", max_tokens=2), priority=100)
        played.turn()
        assert tokens_of(driving) > 0
        assert played.turns.waiting == crowd[3:]
        while crowd[3] not in played.turns.running:
            played.turn()


def test_a_request_far_above_takes_a_row_again_and_again(runtime, played, crowd):
    displaced = runtime.scheduling_metrics.displaced
    take_a_row_again(played, crowd, 3)
    assert runtime.scheduling_metrics.displaced - displaced == 3
    played.finish()
    for each in crowd:
        assert_same_answer(answer(each), runtime.handle_request(dataclasses.replace(each.request)))
        assert [token for piece in each.handle for token in piece.token_ids] == answer(each).token_ids


def test_a_request_that_lost_its_row_twice_and_is_cancelled_keeps_the_most_it_had(played, crowd):
    before = list(crowd[3].sequence.generated)
    take_a_row_again(played, crowd, 2)
    assert tokens_of(crowd[3]) < len(before)
    crowd[3].cancel()
    played.turn()
    assert answer(crowd[3]).token_ids == before
    played.finish()


@pytest.mark.parametrize("prompts", [False, True], ids=["held answer", "held prompt"])
def test_a_deadline_ends_a_request_that_waits_with_its_row(runtime, played, monkeypatch, prompts):
    if prompts:
        monkeypatch.setattr(rows, "PART_TOKENS", 16)
    late = played.submit(request(LONG_PROMPT, max_tokens=20) if prompts else TALKING, deadline=1.0)
    played.turn()
    driving = played.submit(DRIVING, priority=1)
    played.turn(seconds=2.0)
    assert not late.handle.done
    played.turn()
    assert late.handle.done
    assert answer(late).finish_reason == "cancelled"
    assert bool(answer(late).token_ids) is not prompts
    played.finish()
    assert_same_answer(answer(driving), runtime.handle_request(DRIVING))


@pytest.mark.only_on("cpu", reason="fails in a step, of which another device has one queued")
class TestFailures:
    """Only the requests of what failed end."""

    @pytest.fixture
    def three(self, played):
        """One that waits with its row, one that runs, one in the queue."""
        held = played.submit(TALKING)
        played.turn()
        running = played.submit(DRIVING, priority=1)
        played.turn()
        assert held.sequence.held
        return held, running, played.submit(request("stop", max_tokens=5))

    def check(self, runtime, played, failed, others, message):
        played.finish()
        with pytest.raises(EngineError, match=message):
            answer(failed)
        for each in others:
            assert_same_answer(answer(each), runtime.handle_request(dataclasses.replace(each.request)))

    def test_of_a_step(self, runtime, played, three, monkeypatch):
        held, running, waiting = three

        def fail(*args):
            monkeypatch.undo()
            raise EngineError("the step has failed")

        monkeypatch.setattr(runtime.pipeline.runner, "execute_vanilla_decoding_step", fail)
        self.check(runtime, played, running, (held, waiting), "the step has failed")

    def test_of_logits_that_are_not_finite(self, runtime, played, three):
        held, running, waiting = three
        cache = runtime.pipeline.runner.kv_cache
        row = runtime.pipeline.batch.row_of(running.sequence)
        for _, _, slots in cache._bindings:
            slots.rows(row, row + 1).array[...] = float("nan")
        self.check(runtime, played, running, (held, waiting), "logits are not finite at token")

    def test_of_the_device(self, runtime, played, three, monkeypatch):
        """All with a row fail; those in the queue begin, and fail if it is still lost."""
        held, running, waiting = three

        def fail(*args):
            monkeypatch.undo()
            raise DeviceLostError("the device is gone")

        monkeypatch.setattr(runtime.pipeline.runner, "execute_vanilla_decoding_step", fail)
        played.turn()
        for each in (held, running):
            with pytest.raises(DeviceLostError, match="the device is gone"):
                answer(each)
        self.check(runtime, played, held, (waiting,), "the device is gone")

    @pytest.mark.parametrize("stage", ["vision.encode", "prefills.parts", "reuse.match"])
    def test_of_a_prompt(self, runtime, played, three, monkeypatch, stage):
        owner, _, name = stage.rpartition(".")
        owner = getattr(runtime.pipeline, owner) if owner else runtime.pipeline

        def fail(*args, **keywords):
            monkeypatch.undo()
            raise EngineError("the prompt has failed")

        monkeypatch.setattr(owner, name, fail)
        new = played.submit(DRIVING, priority=2)
        self.check(runtime, played, new, three, "the prompt has failed")


def test_an_adapter_that_is_removed_ends_the_requests_that_wait_for_it(
    tiny_lora_engine, device, tiny_checkpoint
):
    from fixtures.tiny_adapter import write_adapter

    adapter = write_adapter(tiny_lora_engine.parent / "removed", tiny_checkpoint, seed=3, r=4)
    with LLMInferenceRuntime(tiny_lora_engine, device, prefix_cache_bytes=0) as runtime:
        runtime.add_lora("new", adapter)
        played, one = PlayedTurns(runtime), request(lora="new", max_tokens=20)
        expected = runtime.handle_request(one)
        running = played.submit(one)
        played.turn()
        waiting = played.submit(one)
        runtime.remove_lora("new")
        played.finish()
        assert_same_answer(answer(running), expected)
        with pytest.raises(ValueError, match="unknown LoRA adapter 'new'"):
            answer(waiting)


def test_rows_of_one_adapter_are_beside_each_other(tiny_lora_engine, device, tiny_checkpoint):
    from fixtures.tiny_adapter import write_adapter

    adapters = {
        name: write_adapter(tiny_lora_engine.parent / f"beside_{name}", tiny_checkpoint, seed=seed, r=4)
        for seed, name in enumerate("ab")
    }
    with LLMInferenceRuntime(tiny_lora_engine, device, lora_dirs=adapters, prefix_cache_bytes=0) as runtime:
        played = PlayedTurns(runtime)
        entries = [
            played.submit(request("go", max_tokens=20 + i, lora=name)) for i, name in enumerate("abab")
        ]
        while played.turns.waiting:
            played.turn()
        assert [sequence.adapter.name for sequence in played.pipeline.batch.sequences] == list("aabb")
        played.finish()
        for each in entries:
            assert_same_answer(answer(each), runtime.handle_request(dataclasses.replace(each.request)))
