# SPDX-License-Identifier: Apache-2.0
"""Prompts beside running answers, on a device that works while the host goes on."""

import dataclasses

import pytest

from doubles.deferred_runtime import WatchedDevice, queueing
from edgellm_ros.engine.errors import DeviceLostError, EngineError
from edgellm_ros.runtime.batch.step_result import StepResult
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.scheduling import rows
from edgellm_ros.runtime.scheduling.shares import Share
from fixtures.answers_of_grammars import SCHEMA
from fixtures.random_schedules import PlayedTurns
from fixtures.requests_for_tests import assert_same_answer, request

pytestmark = pytest.mark.only_on("cpu", reason="these tests bring their own device")
TALKING = request("what do you see?", max_tokens=40)
LONG = request("go to the red box and then turn left at the door " * 5, max_tokens=3)
PART = 16


@pytest.fixture(scope="module")
def late(tiny_engine):
    """A runtime on a device that runs queued work when the host waits."""
    with queueing(), LLMInferenceRuntime(tiny_engine, WatchedDevice(), prefix_cache_bytes=0) as runtime:
        yield runtime


@pytest.fixture
def played(late):
    played = PlayedTurns(late)
    yield played
    played.turns.fail_all(RuntimeError("the test has failed"))


def answer(entry):
    return entry.handle.result(0)


def copies_at_first_token(late, played, **options) -> int:
    """Let a newcomer join an answer; return the copies to the host that wait then."""
    running = played.submit(TALKING)
    played.turn()
    found = []

    def note(progress) -> None:
        if progress.tokens and not found:
            found.append(late.pipeline.device.host_copies)

    newcomer = played.submit(request("stop", on_progress=note, **options))
    played.finish()
    for each in (running, newcomer):
        assert_same_answer(answer(each), late.handle_request(dataclasses.replace(each.request)))
    return found[0]


def test_steps_are_queued_before_the_first_token_is_delivered(late, played):
    assert copies_at_first_token(late, played, max_tokens=6) == 1 + late.pipeline.device.max_queued_steps


def test_no_step_is_queued_before_a_first_token_that_a_mask_depends_on(late, played):
    assert copies_at_first_token(late, played, max_tokens=6, json_schema=SCHEMA) == 0


def test_a_request_begins_behind_a_step(late, played, monkeypatch):
    running = played.submit(TALKING)
    played.turn()
    run, found = late.pipeline.prefills._run, []

    def note(*arguments):
        found.append(late.pipeline.device.host_copies)
        return run(*arguments)

    monkeypatch.setattr(late.pipeline.prefills, "_run", note)
    newcomer = played.submit(request("stop", max_tokens=6))
    played.finish()
    assert found == [1]  # the tokens of the step
    for each in (running, newcomer):
        assert_same_answer(answer(each), late.handle_request(dataclasses.replace(each.request)))


@pytest.mark.parametrize(
    ("priority", "rules"), [(1, {}), (0, {"json_schema": SCHEMA})], ids=["first", "grammar"]
)
def test_a_request_that_comes_first_or_joins_a_grammar_begins_at_once(late, played, priority, rules):
    played.submit(request("go", max_tokens=40, **rules))
    played.turn()
    newcomer = played.submit(request("stop", max_tokens=6), priority=priority)
    played.turn()
    assert newcomer.sequence.generated
    played.finish()


def test_a_request_above_all_begins_though_another_has_begun_behind_the_last_step(late, played):
    running = played.submit(TALKING)
    played.turn()
    newcomer = played.submit(request("stop", max_tokens=6))
    played.turn()
    count = len(running.sequence.generated)
    driving = played.submit(request("go", max_tokens=6), priority=1)
    played.turn()
    assert driving.sequence.generated
    assert len(running.sequence.generated) == count
    played.finish()
    for each in (running, newcomer, driving):
        assert_same_answer(answer(each), late.handle_request(dataclasses.replace(each.request)))


@pytest.fixture
def fails_first(monkeypatch):
    """Let the first token of a request fail."""

    def of(entry, error: Exception) -> None:
        deliver = StepResult.deliver

        def fail(result, sequences, **named):
            if list(sequences) != [entry.sequence]:
                return deliver(result, sequences, **named)
            result.output.wait()
            raise error

        monkeypatch.setattr(StepResult, "deliver", fail)

    return of


def test_a_first_token_that_fails_ends_its_request_only(late, played, fails_first):
    running = played.submit(TALKING)
    played.turn()
    newcomer = played.submit(request("stop", max_tokens=6))
    fails_first(newcomer, EngineError("logits are not finite at token 0 of the answer"))
    played.finish()
    with pytest.raises(EngineError, match="not finite at token 0"):
        answer(newcomer)
    assert_same_answer(answer(running), late.handle_request(TALKING))


def test_a_device_lost_at_a_first_token_ends_all_with_a_row(played, fails_first):
    running = played.submit(TALKING)
    played.turn()
    newcomer = played.submit(request("stop", max_tokens=6))
    fails_first(newcomer, DeviceLostError("the device is gone"))
    played.turn()
    played.turn()
    for each in (running, newcomer):
        with pytest.raises(DeviceLostError, match="the device is gone"):
            answer(each)


def test_a_newcomer_that_is_paused_has_its_first_token_at_once(late, played):
    running = played.submit(TALKING)
    played.turn()
    newcomer = played.submit(request("stop", on_progress=lambda progress: running.handle.raise_priority(5)))
    played.turn()
    played.turn()
    assert newcomer.sequence.held
    assert len(newcomer.sequence.generated) == 1
    played.finish()
    for each in (running, newcomer):
        assert_same_answer(answer(each), late.handle_request(dataclasses.replace(each.request)))


class Watched:
    """The order of tokens of `running`, and of parts of prompts."""

    def __init__(self, late, monkeypatch) -> None:
        self.played = PlayedTurns(late, steps_alone=False)
        self.events: list[str] = []
        monkeypatch.setattr(rows, "PART_TOKENS", PART)
        self._record(monkeypatch, late.pipeline.prefills, "_run", "part")
        self.running = self.played.submit(dataclasses.replace(TALKING, on_progress=self._note))

    def _record(self, monkeypatch, owner, name: str, event: str) -> None:
        original = getattr(owner, name)

        def call(*arguments, **named):
            self.events.append(event)
            return original(*arguments, **named)

        monkeypatch.setattr(owner, name, call)

    def _note(self, progress) -> None:
        if progress.stage == "decode":
            self.events.append("token")

    def begin(self) -> None:
        """Let `running` have its first tokens."""
        self.played.turns._others_wait = lambda: True
        while not self.running.sequence.generated:
            self.played.turn()
        self.played.turns._others_wait = lambda: False
        self.events.clear()

    def begin_parts(self) -> None:
        """Let `running` have tokens, and a long prompt its first parts behind steps."""
        self.begin()
        self.played.submit(LONG)
        arrives = iter([False, False, True])
        self.played.turns._others_wait = lambda: next(arrives, False)
        self.played.turn()


@pytest.fixture
def watched(late, monkeypatch):
    watched = Watched(late, monkeypatch)
    yield watched
    watched.played.turns.fail_all(RuntimeError("the test has failed"))


def test_parts_of_a_prompt_are_queued_behind_steps(late, watched):
    watched.begin()
    joining = watched.played.submit(LONG)
    watched.played.turn()
    parts = -(-len(joining.sequence.token_ids) // PART)
    assert parts > 4
    assert watched.events == ["part", "token"] * parts  # the step of a token is queued before the part
    watched.played.finish()
    for each in (watched.running, joining):
        assert_same_answer(answer(each), late.handle_request(dataclasses.replace(each.request)))


def test_a_newcomer_waits_for_the_step_after_a_part(late, watched):
    other = Share()  # which has had less, so its next request comes before the long prompt
    watched.played.submit(request("go", max_tokens=1), share=other)
    watched.begin_parts()
    newcomer = watched.played.submit(request("stop", max_tokens=4), share=other)
    watched.events.clear()
    watched.played.turn()
    assert set(watched.events) == {"token"}
    assert newcomer in watched.played.turns.waiting
    watched.played.turn()
    assert newcomer not in watched.played.turns.waiting
    watched.played.finish()
    assert_same_answer(answer(newcomer), late.handle_request(dataclasses.replace(newcomer.request)))


def test_a_part_is_not_followed_by_another_where_no_request_may_begin(watched):
    watched.begin_parts()
    watched.played.submit(request("stop", max_tokens=4), priority=1)
    watched.events.clear()
    watched.played.turns.turn(admits=False)
    assert watched.events[0] == "token"
    watched.played.finish()


def test_a_request_of_another_share_does_not_begin_behind_a_part(watched):
    """The others of the first share would go on, with two parts between their steps."""
    watched.begin_parts()
    watched.played.submit(request("stop", max_tokens=4), priority=1, share=Share())
    watched.events.clear()
    watched.played.turn()
    assert watched.events[0] == "token"
    watched.played.finish()


def test_beside_a_grammar_a_part_waits_for_its_turn(late, watched):
    watched.running = watched.played.submit(request("go", max_tokens=40, json_schema=SCHEMA))
    watched.begin()
    watched.played.submit(LONG)
    watched.played.turn()
    assert watched.events.count("part") == 1


def test_a_part_that_fails_behind_a_step_ends_its_request_only(late, watched, monkeypatch):
    watched.begin()
    joining = watched.played.submit(LONG)
    original, parts = late.pipeline.prefills._run, []

    def fail_third(*arguments):
        parts.append(1)
        if len(parts) == 3:
            raise EngineError("the part has failed")
        return original(*arguments)

    monkeypatch.setattr(late.pipeline.prefills, "_run", fail_third)
    watched.played.finish()
    assert len(parts) == 3
    with pytest.raises(EngineError, match="the part has failed"):
        answer(joining)
    assert_same_answer(answer(watched.running), late.handle_request(TALKING))


def test_an_answer_of_one_token_ends_beside_the_next_step(late, watched):
    watched.begin()
    joining = watched.played.submit(dataclasses.replace(LONG, sampling=request(max_tokens=1).sampling))
    while not joining.first_token:
        watched.played.turn()
    watched.events.clear()
    paused = late.scheduling_metrics.paused
    watched.played.turn()
    assert joining.handle.done or len(joining.sequence.generated) == 1
    assert set(watched.events) == {"token"}
    watched.played.turn()
    assert joining.handle.done
    assert late.scheduling_metrics.paused == paused
    watched.played.finish()
    for each in (watched.running, joining):
        assert_same_answer(answer(each), late.handle_request(dataclasses.replace(each.request)))
