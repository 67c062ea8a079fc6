# SPDX-License-Identifier: Apache-2.0
"""Drafting pauses where it is slower than vanilla decoding, on a clock of the test."""

import pytest

from edgellm_ros.runtime.decoding.speculative.fallback import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    PROBE,
    REFRESH,
    SHORT_TRIAL,
    TRIAL,
    Fallback,
)


class Steps:
    """Runs steps that take `round_s` or 1 s, of which rounds yield `tokens`."""

    def __init__(self) -> None:
        self.now, self.round_s, self.tokens = 0.0, 1.5, 2.0
        self.fallback = Fallback(lambda: self.now)
        self.fallback.begin(1)

    def run(self, count: int) -> str:
        """Return the kind of each step: "d" with a draft, "v" without."""
        kinds = ""
        for _ in range(count):
            drafted = self.fallback.drafts()
            self.now += self.round_s if drafted else 1.0
            self.fallback.delivered(drafted, self.tokens if drafted else 1.0)
            kinds += "d" if drafted else "v"
        return kinds


@pytest.fixture
def steps() -> Steps:
    return Steps()


def test_a_trial_measures_rounds_and_then_vanilla_steps(steps):
    assert steps.run(TRIAL + PROBE) == "d" * TRIAL + "v" * PROBE


def test_drafting_goes_on_while_it_yields_more(steps):
    steps.run(TRIAL + PROBE)
    assert steps.run(500) == "d" * 500


def test_vanilla_steps_are_measured_again_from_time_to_time(steps):
    kinds = steps.run(2 * REFRESH)
    assert kinds.count("v") == 2 * PROBE


def test_a_hard_text_pauses_drafting(steps):
    steps.tokens = 1.1
    assert steps.run(TRIAL + PROBE + FIRST_PAUSE) == "d" * TRIAL + "v" * (PROBE + FIRST_PAUSE)
    assert steps.run(SHORT_TRIAL + 1) == "d" * SHORT_TRIAL + "v", "another trial, which fails too"


def test_pauses_become_longer_up_to_the_longest_one(steps):
    steps.tokens = 1.0
    kinds = steps.run(6 * LONGEST_PAUSE)
    pauses = [len(pause) for pause in kinds.split("d") if pause]
    assert pauses[:3] == [PROBE + FIRST_PAUSE, 4 * FIRST_PAUSE, 16 * FIRST_PAUSE]
    assert max(pauses) == LONGEST_PAUSE


def test_text_that_gets_easier_is_drafted_again(steps):
    steps.tokens = 1.0
    steps.run(TRIAL + PROBE + FIRST_PAUSE)
    steps.tokens = 3.0
    assert steps.run(200) == "d" * 200


def test_a_new_text_gets_a_trial_at_once(steps):
    steps.tokens = 1.0
    steps.run(2000)
    steps.fallback.new_text()
    kinds = steps.run(SHORT_TRIAL + FIRST_PAUSE)
    assert kinds == "d" * SHORT_TRIAL + "v" * FIRST_PAUSE, "the last trial failed"


def test_after_a_trial_that_pays_the_next_text_gets_a_long_one(steps):
    steps.tokens = 1.0
    steps.run(100)
    steps.tokens = 3.0
    steps.run(500)
    steps.fallback.new_text()
    steps.tokens = 1.0
    assert steps.run(TRIAL + 1) == "d" * TRIAL + "v"


def test_one_slow_step_changes_nothing(steps):
    steps.round_s = 100.0
    steps.run(1)  # which also binds tensors
    steps.round_s = 1.5
    steps.run(TRIAL - 1 + PROBE)
    assert steps.run(50) == "d" * 50


def test_each_batch_size_has_times_of_its_own(steps):
    """With more sequences a verification may cost more than it yields."""
    steps.run(TRIAL + PROBE + 5)
    steps.fallback.begin(4)
    steps.round_s = 4.0
    assert "v" * FIRST_PAUSE in steps.run(2 * TRIAL + PROBE + FIRST_PAUSE)
