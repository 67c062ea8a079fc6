# SPDX-License-Identifier: Apache-2.0
"""Submitted conversations: their next turns are stored after the response."""

import logging

import pytest

from doubles.played_encoder import PlayedEncoder
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.runtime.conversation import Message
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.scheduling import rows
from fixtures.random_schedules import PlayedTurns
from fixtures.requests_for_tests import IMAGE, assert_same_answer, request

FIRST = Message("user", "what do you see in front of you?")
TALK = request("", messages=(FIRST,), max_tokens=60, temperature=0.8, seed=2)
BESIDE = request("go to the red box", max_tokens=100, temperature=0.8, seed=1)


@pytest.fixture
def runtime(tiny_engine, device):
    with LLMInferenceRuntime(tiny_engine, device) as runtime:
        yield runtime


@pytest.fixture
def played(runtime):
    return PlayedTurns(runtime)


@pytest.mark.only_on("cpu", reason="a GPU has one stream")
def test_the_next_turn_does_not_take_the_encoders_from_a_newcomer(runtime):
    encoder = PlayedEncoder(0)
    played = PlayedTurns(runtime, encoder=encoder)
    talk, looking = played.submit(TALK), request(images=(IMAGE,), max_tokens=4)
    expected = runtime.handle_request(looking)
    runtime.clear_prefix_cache()
    while talk.sequence.tokens_left > 1:
        played.turn()
    joining = played.submit(looking)
    while not talk.handle.done or encoder.is_busy:
        played.turn()
        assert not encoder.is_busy or played.turns._rows.next_turn is None
    assert encoder.beside > 0
    answer = answered(played, talk)
    played.finish()
    assert_same_answer(joining.handle.result(0), expected)
    again = played.submit(second(answer))
    played.finish()
    assert again.handle.result(0).reused_tokens > joining.handle.result(0).prompt_tokens / 2


def second(answer):
    """Return the next turn of the conversation."""
    messages = (FIRST, Message("assistant", answer.text), Message("user", "go there"))
    return request("", messages=messages, max_tokens=8)


def answered(played, entry):
    """Take turns until a request has ended; return its answer."""
    while not entry.handle.done:
        played.turn()
    return entry.handle.result(0)


@pytest.mark.only_on("cpu", reason="counts steps, of which another device has one queued")
def test_the_next_turn_is_stored_in_parts_after_the_response(runtime, played, monkeypatch):
    monkeypatch.setattr(rows, "PART_TOKENS", 16)
    beside, talk = played.submit(BESIDE), played.submit(TALK)
    answer = answered(played, talk)
    assert answer.metrics["keep_s"] < answer.metrics["decode_s"]
    turns = 0
    while played.turns._rows.next_turn is not None:
        before = len(beside.sequence.generated)
        played.turn()
        assert len(beside.sequence.generated) == before + 1
        turns += 1
    assert turns > 3
    played.finish()
    again = played.submit(second(answer))
    played.finish()
    found = again.handle.result(0)
    assert found.reused_tokens > answer.prompt_tokens + 10

    runtime.clear_prefix_cache()
    assert_same_answer(runtime.handle_request(TALK), answer)
    expected = runtime.handle_request(second(answer))
    assert expected.reused_tokens == found.reused_tokens
    assert_same_answer(found, expected)


def test_a_next_turn_is_given_up_for_a_request_that_needs_its_row(runtime, played, monkeypatch):
    monkeypatch.setattr(rows, "PART_TOKENS", 16)
    others = [played.submit(BESIDE) for _ in range(runtime.config.builder.max_batch_size - 1)]
    answer = answered(played, played.submit(TALK))
    played.turn()
    assert len(played.pipeline.batch) == runtime.config.builder.max_batch_size
    new = played.submit(request("stop", max_tokens=3))
    played.turn()
    assert new in played.turns.running
    assert played.turns._rows.next_turn is None
    played.finish()
    again = played.submit(second(answer))
    played.finish()
    assert again.handle.result(0).reused_tokens <= answer.prompt_tokens
    expected = runtime.handle_request(BESIDE)
    for entry in others:
        assert_same_answer(entry.handle.result(0), expected)


def test_a_next_turn_that_fails_harms_no_request(runtime, played, monkeypatch, caplog):
    beside, talk = played.submit(BESIDE), played.submit(TALK)
    answered(played, talk)

    def fail(*args, **keywords):
        monkeypatch.undo()
        raise EngineError("no turn")

    monkeypatch.setattr(runtime.pipeline.prefills, "_run", fail)
    with caplog.at_level(logging.WARNING):
        played.finish()
    assert "the next turn of a conversation is not stored: no turn" in caplog.text
    assert_same_answer(beside.handle.result(0), runtime.handle_request(BESIDE))


def test_a_next_turn_waits_for_a_higher_priority(played, monkeypatch):
    monkeypatch.setattr(rows, "PART_TOKENS", 16)
    talk = played.submit(TALK)
    answered(played, talk)
    played.submit(request("stop", max_tokens=5), priority=1)
    played.turn()
    assert played.turns._rows.next_turn is None
    assert not played.turns.is_idle
    played.finish()
