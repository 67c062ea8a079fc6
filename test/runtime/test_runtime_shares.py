# SPDX-License-Identifier: Apache-2.0
"""Shares of a runtime: proportions, starving, the first claim of driving."""

import itertools
from types import SimpleNamespace

import pytest

from edgellm_ros.runtime.metrics import RuntimeMetrics
from edgellm_ros.runtime.request import LLMGenerationResponse
from edgellm_ros.runtime.scheduling import rows
from edgellm_ros.runtime.scheduling import shares as shares_module
from edgellm_ros.runtime.scheduling.entry import Entry
from edgellm_ros.runtime.scheduling.shares import (
    FIRST_CLAIM,
    IDLE_S,
    MOST_BEHIND,
    POLICY_TOKENS,
    Share,
    Shares,
)
from edgellm_ros.runtime.scheduling.turns import Turns
from fixtures.random_schedules import Clock, PlayedTurns
from fixtures.requests_for_tests import IMAGE, assert_same_answer, request

DRIVING = request(images=(IMAGE,), max_tokens=6)
TALKING = request("what do you see?", max_tokens=40, temperature=0.7, seed=1)


def answer(entry):
    return entry.handle.result(0)


def tokens_of(entry) -> int:
    return len(entry.sequence.generated)


@pytest.fixture
def played(runtime):
    played = PlayedTurns(runtime)
    yield played
    played.turns.fail_all(RuntimeError("the test has failed"))


class Asking:
    """A share that keeps some requests open, without a pause."""

    def __init__(self, played: PlayedTurns, share: Share, count: int, one, priority: int = 0) -> None:
        self.played, self.share, self.count, self.one, self.priority = played, share, count, one, priority
        self.entries: list[Entry] = []

    @property
    def open(self) -> list[Entry]:
        return [entry for entry in self.entries if not entry.handle.done]

    def ask(self) -> None:
        while len(self.open) < self.count:
            self.entries.append(self.played.submit(self.one, self.priority, share=self.share))


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_tokens_are_divided_in_proportion_to_the_weights(played, weight):
    many, few = Share(weight), Share()
    clients = [Asking(played, many, 12, request("go", max_tokens=20)), Asking(played, few, 4, TALKING)]
    while few.tokens < 1500:
        for client in clients:
            client.ask()
        played.turn()
    assert many.tokens / few.tokens == pytest.approx(weight, rel=0.1)
    played.finish()


def test_a_request_of_another_share_begins_before_all_that_wait_longer(runtime, played):
    greedy, late = Share(), Share()
    crowd = [played.submit(request("go", max_tokens=15), share=greedy) for _ in range(20)]
    for _ in range(10):
        played.turn(seconds=1.0)  # their levels rise
    one = played.submit(TALKING, share=late)
    waiting = len(played.turns.waiting)
    while not tokens_of(one):
        played.turn(seconds=1.0)
    assert waiting - len(played.turns.waiting) <= 4 + 1  # the rows that became free at once
    assert len([entry for entry in crowd if not entry.handle.done]) > 8
    played.finish()
    assert_same_answer(answer(one), runtime.handle_request(TALKING))


def test_long_answers_that_hold_all_rows_give_one_up(runtime, played, monkeypatch):
    monkeypatch.setattr(shares_module, "BEHIND", 60)
    greedy, late = Share(), Share()
    long = request("go", max_tokens=60, temperature=0.8, seed=2)
    crowd = [played.submit(long, share=greedy) for _ in range(4)]
    for _ in range(5):
        played.turn()
    one = played.submit(TALKING, share=late)
    while not tokens_of(one):
        assert not any(entry.handle.done for entry in crowd)
        played.turn()
    assert played.turns.waiting == [crowd[3]]
    played.finish()
    assert_same_answer(answer(one), runtime.handle_request(TALKING))
    for entry in crowd:
        assert_same_answer(answer(entry), runtime.handle_request(long))


def test_driving_of_a_share_comes_before_requests_of_another(runtime, played):
    talking = [played.submit(TALKING, priority=10, share=Share()) for _ in range(4)]
    while not all(map(tokens_of, talking)):
        played.turn()
    counts = {entry: tokens_of(entry) for entry in talking}
    driving = played.submit(DRIVING, priority=FIRST_CLAIM, share=Share())
    while not driving.handle.done:
        played.turn()
        (displaced,) = (entry for entry in talking if entry.kept is not None)  # its row was needed
        assert all(tokens_of(entry) == counts[entry] for entry in talking if entry is not displaced)
    assert played.turns.waiting == [displaced]
    played.finish()
    assert_same_answer(answer(driving), runtime.handle_request(DRIVING))


def test_lower_priorities_do_not_reach_beyond_their_share(played):
    first, other = Share(), Share()
    low, beside = played.submit(TALKING, share=first), played.submit(TALKING, priority=-10, share=other)
    while not (tokens_of(low) and tokens_of(beside)):
        played.turn()
    played.submit(request("stop", max_tokens=20), priority=10, share=first)
    counts = tokens_of(low), tokens_of(beside)
    for _ in range(5):
        played.turn()
    assert tokens_of(low) == counts[0]
    assert tokens_of(beside) > counts[1]
    played.finish()


def test_a_request_that_must_wait_in_its_share_does_not_hold_up_another(played):
    first, other = Share(), Share()
    played.submit(TALKING, priority=10, share=first)
    played.turn()
    other.used = first.used + 500  # so that the first share's request is asked first
    held = played.submit(TALKING, share=first)
    going = played.submit(TALKING, share=other)
    played.turn()
    assert held in played.turns.waiting
    assert tokens_of(going)
    played.finish()


def test_a_prompt_that_must_wait_in_its_share_does_not_hold_up_another(played, monkeypatch):
    monkeypatch.setattr(rows, "PART_TOKENS", 16)
    first, other = Share(), Share()
    low = played.submit(request("go to the red box and then turn left " * 6), share=first)
    played.turn()
    played.submit(TALKING, priority=10, share=first)
    played.turn()
    other.used = first.used + 500  # so that the first share's prompt is asked first
    going = played.submit(TALKING, share=other)
    for _ in range(12):
        played.turn()
    assert low.prompts is not None
    assert tokens_of(going)
    played.finish()


def test_beside_driving_without_a_pause_a_share_that_is_behind_goes_on_at_each_step(played, monkeypatch):
    monkeypatch.setattr(shares_module, "BEHIND", 200)
    driver, talker = Share(), Share()
    clients = [Asking(played, driver, 1, DRIVING, FIRST_CLAIM), Asking(played, talker, 1, TALKING)]
    clients[0].ask()
    played.turn()
    tokens, alone = [0], 0
    while talker.tokens < 400:
        for client in clients:
            client.ask()
        played.turn()
        tokens.append(talker.tokens)
        alone = alone if talker.tokens else driver.tokens
    assert 200 < alone < 300  # of driving, before the other share had any
    began = tokens.count(0)
    assert all(after > before for before, after in itertools.pairwise(tokens[began - 1 :]))
    played.finish()


def test_a_request_that_must_be_alone_gets_an_empty_batch_from_shares_that_drive(played, monkeypatch):
    monkeypatch.setattr(shares_module, "BEHIND", 200)
    drivers = [Asking(played, Share(), 1, DRIVING, FIRST_CLAIM) for _ in range(2)]
    drivers[0].ask()
    played.turn()
    guided = played.submit(TALKING, share=Share())
    object.__setattr__(guided.request, "guidance", 1.0)  # which this engine does not take
    while not guided.handle.done:
        assert played.count < 200
        for driver in drivers:
            driver.ask()
        played.turn()
    assert sum(driver.share.tokens for driver in drivers) > 200
    played.finish()


def test_a_share_that_was_idle_is_not_ahead_of_the_others():
    shares, busy, idle = Shares(), Share(), Share()
    shares.charge(busy, 10_000)
    shares.begin([busy, idle], 100.0)
    assert idle.used == busy.used
    shares.end([busy, idle], 100.0)
    shares.charge(busy, 500)
    shares.begin([busy, idle], 100.0 + IDLE_S / 2)
    assert busy.used - idle.used == 500
    shares.begin([busy, idle], 100.0 + 2 * IDLE_S)
    assert busy.used == idle.used


def test_a_share_with_few_requests_saves_up_only_so_much():
    shares, busy, rare = Shares(), Share(), Share()
    for turn in range(100):
        shares.begin([busy, rare], float(turn))
        shares.charge(busy, 100)
        shares.end([busy, rare], float(turn))
    shares.begin([rare], 100.0)
    assert busy.used - rare.used == MOST_BEHIND


def test_trajectories_count_by_their_euler_steps(acting_runtime):
    played, share = PlayedTurns(acting_runtime), Share()
    one = request(images=(IMAGE,), action_samples=2, denoise_steps=7, max_tokens=30)
    entry = played.submit(one, share=share)
    played.finish()
    response = answer(entry)
    assert response.actions is not None
    assert share.tokens == response.prompt_tokens + len(response.token_ids) + 2 * 7


class TestPolicies:
    """A policy answers one request after another."""

    @pytest.fixture
    def turns(self):
        seconds = {"first_token_s": 0.0, "total_s": 0.0}
        response = LLMGenerationResponse("", [], "stop", 0, None, None, None, 0, "", seconds)
        self.answered: list[str] = []

        def answer_one(name: str) -> LLMGenerationResponse:
            self.answered.append(name)
            return response

        self.clock = Clock()
        return Turns(SimpleNamespace(answer_one=answer_one), RuntimeMetrics(), self.clock)

    def submit(self, turns: Turns, name: str, share: Share, priority: int = 0) -> None:
        entry = Entry(
            request(), share=share, priority=priority, deadline=None, clock=self.clock, changed=lambda: None
        )
        entry.sequence, entry.number = name, len(self.answered) + len(turns.waiting)
        turns.waiting.append(entry)

    def test_shares_take_turns(self, turns):
        first, second = Share(), Share()
        for _ in range(4):
            self.submit(turns, "a", first)
        for _ in range(3):
            self.submit(turns, "b", second)
        while turns.waiting:
            turns.turn()
        assert "".join(self.answered) == "abababa"
        assert first.tokens == 4 * POLICY_TOKENS

    def test_two_shares_that_drive_leave_a_third_one_its_part(self, turns):
        drivers, goals = [Share(), Share()], Share()
        for _ in range(60):
            for name, share in zip("ab", drivers, strict=True):
                if not any(entry.share is share for entry in turns.waiting):
                    self.submit(turns, name, share, FIRST_CLAIM)
            if not any(entry.share is goals for entry in turns.waiting):
                self.submit(turns, "g", goals)
            turns.turn()
        assert set(self.answered[:4]) == {"a", "b"}
        assert self.answered.count("g") >= 15
