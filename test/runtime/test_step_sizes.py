# SPDX-License-Identifier: Apache-2.0
"""Steps have the size with the most tokens per second, on a test's clock."""

from collections import deque
from collections.abc import Callable
from math import log2
from random import Random

import pytest

from edgellm_ros.runtime.decoding.speculative.step_sizes import MEASUREMENTS, REVISIT, UNKNOWN, StepSizes

CHEAP = {1: 1.0, 2: 1.15, 4: 1.3, 9: 1.8}  # seconds of steps by size
DEAR = {1: 1.0, 2: 1.75, 4: 2.2, 9: 2.95}
ONE_SIZE = {1: 1.0, 8: 1.5}


class Steps:
    """Runs steps that take `seconds` and yield `tokens`.

    `ahead` of them are queued ahead. With a `probability` guesses are right after right ones with it, and
    `tokens` does not count.
    """

    def __init__(self, seconds: dict[int, float], ahead: int = 0) -> None:
        self.now, self.room, self.generated = 0.0, 100, 0
        self.seconds: Callable[[int], float] = lambda size: seconds[size]
        self.probability: float | None = None
        self.tokens = 2
        self.resume_s = self.wait_s = (
            0.0  # a vanilla step after a round, a round after a vanilla step: longer
        )
        self.step_sizes = StepSizes(
            [size for size in seconds if size > 1], max(seconds) - 1, lambda: self.now
        )
        self.step_sizes.begin(1)
        self._ahead, self._queued, self._random = ahead, deque(), Random(0)
        self._before = 1

    def run(self, count: int) -> list[int]:
        """Return the size of each step."""
        return [self._step() for _ in range(count)]

    def _step(self) -> int:
        while len(self._queued) <= self._ahead:
            self._queued.append(self.step_sizes.next_size(self.room))
        size = self._queued.popleft()
        tokens = 1
        if self.probability is None:
            tokens = min(self.tokens, size)
        else:
            while tokens < size and self._random.random() < self.probability:
                tokens += 1
        self.now += self.seconds(size)
        if (size > 1) != (self._before > 1):
            self.now += self.wait_s if size > 1 else self.resume_s
        self._before = size
        self.generated += tokens
        self.step_sizes.delivered([tokens])
        return size


def share(sizes: list[int], size: int) -> float:
    return sizes.count(size) / len(sizes)


def test_the_ends_are_measured_first():
    steps = Steps(CHEAP)
    steps.tokens = 9
    assert steps.run(20) == [1] * UNKNOWN + [9] * (20 - UNKNOWN)


def test_sizes_between_are_tried_without_a_measurement_of_each():
    """Times lie on a line between those of a vanilla step and of the longest chain."""
    steps = Steps(CHEAP)
    steps.tokens = 3
    sizes = steps.run(30)
    assert sizes.count(9) <= UNKNOWN + 3
    assert sizes[15:] == [4] * 15


@pytest.mark.parametrize(
    ("seconds", "probability", "best"),
    [(CHEAP, 0.97, 9), (CHEAP, 0.5, 4), (CHEAP, 0.25, 2), (CHEAP, 0.0, 1), (DEAR, 0.97, 9), (DEAR, 0.5, 1)],
)
def test_steps_have_the_size_with_the_most_tokens_a_second(seconds, probability, best):
    """Of CHEAP, tokens a second of the longest to vanilla.

    4.4, 2.9, 1.7 and 1 with 0.97; 1.1, 1.4, 1.3 and 1 with 0.5.
    """
    steps = Steps(seconds)
    steps.probability = probability
    steps.run(50)
    sizes = steps.run(1000)
    assert max(seconds, key=sizes.count) == best


@pytest.mark.parametrize("seconds", [CHEAP, DEAR, {1: 1.0, 2: 1.3, 4: 1.5, 9: 2.2}])
@pytest.mark.parametrize("probability", [0.0, 0.3, 0.5, 0.7, 0.9, 1.0])
def test_tokens_take_little_more_time_than_with_the_best_fixed_size(seconds, probability):
    """Most where two sizes are about as good, because evidence of few rounds varies."""
    steps = Steps(seconds)
    steps.probability = probability
    steps.run(6000)
    expected = {size: sum(probability**level for level in range(size)) for size in seconds}
    best = min(seconds[size] / expected[size] for size in seconds)
    assert steps.now / steps.generated < (1.1 if probability in (0.5, 0.7) else 1.035) * best


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("round_s", [1.1, 1.4, 2.5, 8.0, 50.0])
def test_wrong_guesses_cost_at_most_the_first_rounds_and_a_share(round_s, ahead):
    """Until costs are known, and when they are measured again."""
    steps = Steps({1: 1.0, 8: round_s}, ahead)
    steps.tokens = 1
    for tokens in range(1, 6000):
        steps.run(1)
        first = 2 + (round_s - 1) * (UNKNOWN + log2(1 + tokens / REVISIT))
        assert steps.now - tokens <= first + 0.03 * tokens


def test_wrong_guesses_cost_a_share_with_what_a_pause_costs():
    """A round after a pause runs the head on its tokens; the next step begins another."""
    steps = Steps(ONE_SIZE)
    steps.tokens, steps.wait_s, steps.resume_s = 1, 0.6, 0.4
    steps.run(6000)
    assert steps.now / 6000 < 1.03


@pytest.mark.parametrize("seconds", [CHEAP, DEAR])
def test_a_text_that_cannot_be_guessed_stops_drafting_soon(seconds):
    steps = Steps(seconds)
    steps.tokens = 9
    assert steps.run(500)[-1] == 9
    steps.tokens = 1
    sizes = steps.run(200)
    assert set(sizes[:15]) == {9}  # not by a few unlucky rounds
    assert share(sizes[35:], 1) > 0.85


@pytest.mark.parametrize("seconds", [CHEAP, DEAR])
def test_a_text_that_gets_easier_has_long_chains_soon(seconds):
    """Within 20 rounds, the first of which comes soon."""
    steps = Steps(seconds)
    steps.probability = 0.1
    assert share(steps.run(1000), 1) > 0.6
    steps.probability = 1.0
    sizes = steps.run(140)
    rounds = [size for size in sizes if size > 1]
    assert set(rounds[20:]) == {9}
    assert len(sizes) - len(rounds) < 100


def test_short_chains_get_longer_within_20_rounds():
    steps = Steps(CHEAP)
    steps.tokens = 3
    assert steps.run(500)[-1] == 4
    steps.tokens = 9
    assert steps.run(40)[20:] == [9] * 20


def test_unlucky_rounds_change_nothing():
    steps = Steps(ONE_SIZE)
    steps.tokens = 4
    steps.run(50)
    for _ in range(10):
        steps.tokens = 1
        assert steps.run(3) == [8] * 3
        steps.tokens = 4
        assert steps.run(6) == [8] * 6


def test_load_at_the_start_is_forgotten_when_it_ends():
    """The times of rounds under load are not compared with those of steps without."""
    steps = Steps(CHEAP)
    steps.tokens = 9
    slow = {1: 1.0, 2: 9.0, 4: 9.5, 9: 12.0}
    steps.seconds = lambda size: slow[size]  # the load begins after the vanilla steps
    assert steps.run(60)[-10:] == [1] * 10
    steps.seconds = lambda size: CHEAP[size]
    sizes = steps.run(2 * REVISIT)
    assert share(sizes[-100:], 9) >= 0.97


def test_load_at_the_start_of_all_steps_is_forgotten_when_it_ends():
    steps = Steps(CHEAP)
    steps.tokens = 3
    steps.seconds = lambda size: 4 * CHEAP[size] + (6 if size == 4 else 0)
    assert steps.run(100)[-1] == 9  # size 4 was measured under more load than the others
    steps.seconds = lambda size: CHEAP[size]
    assert share(steps.run(2 * REVISIT)[-100:], 4) >= 0.97


@pytest.mark.parametrize(("tokens", "best"), [(1, 1), (4, 4), (9, 9)])
def test_load_that_comes_and_goes_does_not_decide(tokens, best):
    """Half of the steps take up to five times as long, by turns of some steps."""
    steps, random = Steps(DEAR), Random(1)
    steps.tokens = tokens
    load = [1.0]

    def seconds(size: int) -> float:
        if random.random() < 0.2:
            load[0] = random.choice([1.0, 1.0, 2.0, 5.0])
        return load[0] * DEAR[size]

    steps.seconds = seconds
    steps.run(100)
    assert share(steps.run(2000), best) > 0.7


def test_one_slow_step_changes_nothing():
    steps = Steps(CHEAP)
    steps.tokens = 9
    steps.run(50)
    steps.seconds = lambda size: 100.0
    assert steps.run(1) == [9]
    steps.seconds = lambda size: CHEAP[size]
    assert steps.run(80) == [9] * 80


def test_load_that_goes_on_is_measured():
    """Where rounds get slower than their tokens are worth, vanilla steps follow."""
    steps = Steps(CHEAP)
    steps.tokens = 9
    steps.run(50)
    steps.seconds = lambda size: 20.0 if size > 1 else 1.0
    assert share(steps.run(6 * MEASUREMENTS)[-MEASUREMENTS:], 1) > 0.9


@pytest.mark.parametrize("tokens", [1, 9])
def test_at_most_two_percent_of_the_steps_measure_sizes_that_are_not_best(tokens):
    """With wrong guesses, rounds that learn about the text are among them."""
    steps = Steps(DEAR)
    steps.tokens = tokens
    steps.run(50)
    sizes = steps.run(20 * REVISIT)
    best = max(DEAR, key=sizes.count)
    assert best == tokens
    assert 1 - share(sizes, best) <= 0.02
    for size in DEAR:
        assert sizes.count(size) >= 5


def test_each_batch_size_has_times_of_its_own():
    """With more sequences a verification may cost more than it yields."""
    steps = Steps(ONE_SIZE)
    steps.run(20)
    steps.step_sizes.begin(4)
    steps.seconds = lambda size: 4.0 if size > 1 else 1.0
    sizes = steps.run(100)
    assert sizes[:UNKNOWN] == [1] * UNKNOWN
    assert sizes.count(8) <= UNKNOWN + 2
    steps.step_sizes.begin(1)
    assert steps.run(1) == [8]


def test_a_batch_that_ends_with_rounds_in_the_queue_does_not_count_them():
    steps = Steps(ONE_SIZE)
    steps.run(UNKNOWN)
    for _ in range(20):
        assert steps.step_sizes.next_size(8) == 8
        steps.step_sizes.begin(1)


def test_the_last_round_of_an_answer_says_nothing_about_guesses():
    steps = Steps(ONE_SIZE)
    steps.run(20)
    for _ in range(50):
        assert steps.step_sizes.next_size(8) == 8
        steps.now += 1.5
        steps.step_sizes.delivered([])


def test_sequences_of_a_batch_count_by_their_average():
    now = [0.0]
    step_sizes = StepSizes([8], 7, lambda: now[0])
    step_sizes.begin(2)
    sizes = []
    for _ in range(50):
        sizes.append(step_sizes.next_size(8))
        now[0] += 1.0 if sizes[-1] == 1 else 3.0
        step_sizes.delivered([1, 1] if sizes[-1] == 1 else [1, 6])
    assert sizes[-10:] == [8] * 10  # 3.5 tokens for 3 steps


def test_a_round_has_room():
    steps = Steps(CHEAP)
    steps.tokens = 9
    steps.run(100)
    steps.room = 5
    assert max(steps.run(50)) == 4
    only = Steps(ONE_SIZE)
    only.tokens = 3
    only.run(100)
    assert only.step_sizes.next_size(3) == 3
    assert only.step_sizes.next_size(1) == 1
