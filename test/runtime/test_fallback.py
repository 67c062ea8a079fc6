# SPDX-License-Identifier: Apache-2.0
"""Drafting pauses where it is slower than vanilla decoding, on a test's clock."""

from collections import deque

import pytest

from edgellm_ros.runtime.decoding.speculative.fallback import (
    PROBE,
    REFRESH,
    RESERVE,
    SHARE,
    UNKNOWN,
    Fallback,
)


class Steps:
    """Runs rounds, which take `round_s` and yield `tokens`, and steps of 1 s.

    `ahead`: the number of steps queued ahead.
    """

    def __init__(self, ahead: int = 0) -> None:
        self.now, self.round_s, self.tokens = 0.0, 1.5, 2.0
        self.waiting_s = 0.0  # a round after vanilla steps takes longer by this
        self.resume_s = 0.0  # a vanilla step after a round takes longer by this
        self.fallback = Fallback(lambda: self.now)
        self.fallback.begin(1)
        self._ahead, self._queued, self._drafted = ahead, deque(), False

    def run(self, count: int) -> str:
        """Return the kind of each step: "d" with a draft, "v" without."""
        kinds = ""
        for _ in range(count):
            while len(self._queued) <= self._ahead:
                self._queued.append(self.fallback.drafts())
            drafted = self._queued.popleft()
            self.now += self.round_s if drafted else 1.0
            if drafted != self._drafted:
                self.now += self.waiting_s if drafted else self.resume_s
            self._drafted = drafted
            self.fallback.delivered(drafted, self.tokens if drafted else 1.0)
            kinds += "d" if drafted else "v"
        return kinds


@pytest.fixture
def steps() -> Steps:
    return Steps()


def test_vanilla_steps_are_measured_before_the_first_round(steps):
    assert steps.run(PROBE + 2) == "v" * PROBE + "dd"


def test_drafting_goes_on_while_it_yields_more(steps):
    steps.run(PROBE)
    assert steps.run(500) == "d" * 500


def test_vanilla_steps_are_measured_again_from_time_to_time(steps):
    kinds = steps.run(2 * REFRESH)
    assert kinds.count("v") == 2 * PROBE


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("round_s", [1.1, 1.4, 2.5])
def test_wrong_guesses_cost_at_most_five_percent_after_64_tokens(round_s, ahead):
    steps = Steps(ahead)
    steps.tokens, steps.round_s = 1.0, round_s
    for answers in range(1, 20):
        steps.run(64)
        assert steps.now / (64 * answers) < 1.05


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("round_s", [1.0, 1.2, 3.0, 8.0, 50.0])
def test_wrong_guesses_cost_at_most_their_share_or_the_first_rounds(round_s, ahead):
    steps = Steps(ahead)
    steps.tokens, steps.round_s = 1.0, round_s
    for tokens in range(1, 6000):
        steps.run(1)
        assert steps.now - tokens <= max(UNKNOWN * (round_s - 1), SHARE * tokens) + 1e-6


@pytest.mark.parametrize("ahead", [0, 1])
def test_wrong_guesses_cost_at_most_their_share_with_what_a_pause_costs(ahead):
    """A round after a pause runs the head on the tokens of the pause.

    The next step begins another pause.
    """
    steps = Steps(ahead)
    steps.tokens, steps.round_s, steps.waiting_s, steps.resume_s = 1.0, 1.5, 0.6, 0.4
    steps.run(6000)
    assert steps.now / 6000 < 1 + 1.1 * SHARE


def test_a_text_that_cannot_be_guessed_stops_drafting_soon(steps):
    steps.run(500)
    steps.tokens = 1.0
    kinds = steps.run(100)
    assert kinds.startswith("d" * (RESERVE - 1))
    assert kinds.count("d") <= RESERVE + 1 + SHARE * 100 / (steps.round_s - 1)


def test_unlucky_rounds_do_not_stop_drafting(steps):
    steps.run(500)
    for _ in range(20):
        steps.tokens = 1.0
        assert steps.run(4) == "dddd"
        steps.tokens = 3.0
        assert steps.run(4) == "dddd"


def test_text_that_gets_easier_is_drafted_again(steps):
    steps.tokens = 1.0
    steps.run(1000)
    steps.tokens = 3.0
    kinds = steps.run(200)
    between_rounds = (steps.round_s - 1) / SHARE
    assert kinds.index("d") <= between_rounds + 1
    assert kinds.endswith("d" * 150)


def test_one_slow_step_changes_nothing(steps):
    steps.run(PROBE)
    steps.round_s = 100.0
    steps.run(1)  # which also binds tensors
    steps.round_s = 1.5
    assert steps.run(50) == "d" * 50
    steps.round_s = 100.0
    steps.run(1)
    steps.round_s = 1.5
    assert steps.run(50) == "d" * 50


def test_each_batch_size_has_times_of_its_own(steps):
    """With more sequences a verification may cost more than it yields."""
    steps.run(PROBE + 5)
    steps.fallback.begin(4)
    steps.round_s = 4.0
    kinds = steps.run(100)
    assert kinds.startswith("v" * PROBE)
    assert kinds.count("d") <= UNKNOWN + 1


def test_a_batch_that_ends_with_rounds_in_the_queue_does_not_count_them(steps):
    steps.run(PROBE + 50)
    for _ in range(20):
        assert steps.fallback.drafts()
        steps.fallback.begin(1)
