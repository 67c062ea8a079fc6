# SPDX-License-Identifier: Apache-2.0
"""The first token of a newcomer, on a device that works while the host queues the next step."""

import dataclasses

import pytest

from doubles.deferred_runtime import WatchedDevice, queueing
from edgellm_ros.engine.errors import DeviceLostError, EngineError
from edgellm_ros.runtime.batch.step_result import StepResult
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures.answers_of_grammars import SCHEMA
from fixtures.random_schedules import PlayedTurns
from fixtures.requests_for_tests import assert_same_answer, request

pytestmark = pytest.mark.only_on("cpu", reason="these tests bring their own device")
TALKING = request("what do you see?", max_tokens=12)


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


@pytest.mark.parametrize("options", [{"max_tokens": 1}, {"max_tokens": 6, "json_schema": SCHEMA}])
def test_no_step_is_queued_before_a_first_token_that_it_depends_on(late, played, options):
    assert copies_at_first_token(late, played, **options) == 0


@pytest.fixture
def fails_first(monkeypatch):
    """Let the first token of a request fail."""

    def of(entry, error: Exception) -> None:
        deliver = StepResult.deliver

        def fail(result, sequences):
            if list(sequences) != [entry.sequence]:
                return deliver(result, sequences)
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
    for each in (running, newcomer):
        with pytest.raises(DeviceLostError, match="the device is gone"):
            answer(each)


def test_a_newcomer_that_is_paused_has_its_first_token_at_once(late, played):
    running = played.submit(TALKING)
    played.turn()
    newcomer = played.submit(request("stop", on_progress=lambda progress: running.handle.raise_priority(5)))
    played.turn()
    assert newcomer.sequence.held
    assert len(newcomer.sequence.generated) == 1
    played.finish()
    for each in (running, newcomer):
        assert_same_answer(answer(each), late.handle_request(dataclasses.replace(each.request)))
