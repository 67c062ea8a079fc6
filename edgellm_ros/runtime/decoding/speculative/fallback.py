# SPDX-License-Identifier: Apache-2.0
"""Fallback: decides whether to draft, and how many tokens, by costs and yields.

The steps are vanilla steps. The gain of a round, which may be negative, is the time that vanilla steps would
take for its tokens, less its own time, less the extra time of the first vanilla step after a round. Gains and
a share of the time that vanilla steps would have taken are added to an allowance. A round is allowed if the
allowance covers the loss of a round whose guesses are all wrong:

  steps       | good rounds         | bad rounds | vanilla steps | a round | vanilla steps | ...
  allowance   | stays at its limit  | falls      | grows slowly  | falls   | grows slowly  |

So over the life of a runtime rounds lose at most this share, whatever a round costs, except for the first
ones of each batch size, whose cost is not known. The limit of the allowance is what a few bad rounds lose, so
a text that cannot be guessed stops drafting soon, and an unlucky round in a good text does not.

Where rounds may have several sizes, the next round has the size with the most expected tokens per second. A
round of n tokens yields 1 + a + a^2 + ... + a^(n-1) tokens, if each guess is right with probability a after
right ones. Newer rounds count more in a.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

SHARE = 0.02  # of the time of vanilla steps that rounds may lose
RESERVE = 8  # bad rounds that the largest allowance covers
UNKNOWN = 2  # rounds until the cost of a round is known
PROBE = 3  # vanilla steps until their cost is known
REFRESH = 1024  # rounds until vanilla steps are measured again
MEASUREMENTS = 9  # whose median is the cost
OUTLIER = 2  # medians: the longest time of a step; what exceeds it has another cause
REVISIT = 64  # rounds after which a size that is not chosen is measured again
KEPT = 0.95  # weight of earlier guesses relative to those of a round


class StepTimes:
    """Seconds of the steps of one size and batch size."""

    def __init__(self) -> None:
        self.steps = 0
        self.uncharged: list[float] = []  # tokens of rounds that were delivered before their cost was known
        self.rounds_since = 0  # rounds of other sizes since the last one of this size
        self._seconds: deque[float] = deque(maxlen=MEASUREMENTS)

    def add(self, seconds: float) -> None:
        """Measure a step.

        The first one of a size also binds tensors, so its time does not count.
        """
        self.steps += 1
        if self.steps > 1:
            self._seconds.append(seconds)

    @property
    def cost(self) -> float | None:
        """Seconds of a step; None = not known."""
        return median(self._seconds) if self._seconds else None


class Guesses:
    """How often a guess is right after right ones."""

    def __init__(self) -> None:
        self._right, self._all = 1.0, 1.0  # as if one had been right: long drafts come first

    def add(self, tokens: float, size: int) -> None:
        """Add a round of `size` tokens at most that has yielded `tokens`.

        tokens: of each sequence, on average.
        """
        self._right = KEPT * self._right + max(tokens - 1, 0)
        self._all = KEPT * self._all + min(tokens, size - 1)

    def expected(self, size: int) -> float:
        """Return the expected number of tokens of a round of `size` tokens at most."""
        return sum((self._right / self._all) ** level for level in range(size))


class Fallback:
    """Chooses the size of each step.

    - sizes: most tokens of a round, falling; a vanilla step has one
    - clock: returns seconds
    """

    def __init__(self, sizes: Sequence[int], clock: Callable[[], float] = time.perf_counter) -> None:
        self._sizes = sizes
        self._clock = clock
        self._times: dict[tuple[int, int], StepTimes] = {}  # by batch size and size
        self._guesses = Guesses()
        self._allowance = 0.0
        self._until_refresh = REFRESH
        self._probe = 0  # vanilla steps that are left of a probe
        self.begin(0)

    def begin(self, batch: int) -> None:
        """Begin to measure steps of this batch size; no step may be queued."""
        self._vanilla = self._times.setdefault((batch, 1), StepTimes())
        self._rounds = {size: self._times.setdefault((batch, size), StepTimes()) for size in self._sizes}
        for times in self._rounds.values():
            times.uncharged.clear()
        self._queued: deque[int] = deque()  # sizes of rounds
        self._after_round = False
        self._last = self._clock()

    def next_size(self, room: int) -> int:
        """Return the most tokens of the next step, 1 = vanilla; called once for each step.

        room: the most tokens that a round may have, 2 or more. A round with less room than the smallest size
        counts as one of that size.
        """
        if self._probe:
            self._probe -= 1
            return 1
        if self._vanilla.cost is None or self._until_refresh <= 0:
            self._until_refresh = REFRESH
            self._probe = PROBE - 1
            return 1
        size = self._best_size(room)
        if not self._allows_a_round(size):
            return 1
        self._queued.append(size)
        self._until_refresh -= 1
        return min(size, room)

    def delivered(self, drafted: bool, tokens: float) -> None:
        """Measure a step that has been delivered; tokens: of each sequence, on average."""
        now, after_round = self._clock(), self._after_round
        seconds, self._last, self._after_round = now - self._last, now, drafted
        if drafted:
            self._add_round(self._queued.popleft(), seconds, tokens)
            return
        self._vanilla.add(seconds)
        vanilla = self._vanilla.cost
        if vanilla is not None:
            self._allowance += SHARE * vanilla
            if after_round:
                self._allowance -= max(min(seconds, OUTLIER * vanilla) - vanilla, 0.0)
            self._limit_allowance(vanilla)

    def _add_round(self, size: int, seconds: float, tokens: float) -> None:
        times = self._rounds[size]
        known = times.cost is not None
        times.add(seconds)
        times.uncharged.append(tokens)
        for other in self._rounds.values():
            other.rounds_since += 1
        times.rounds_since = 0
        self._guesses.add(tokens, size)
        vanilla, cost = self._vanilla.cost, times.cost
        if vanilla is None or cost is None:
            return
        taken = min(seconds, OUTLIER * cost) if known else cost
        for yielded in times.uncharged:
            self._allowance += (1 + SHARE) * yielded * vanilla - taken
        times.uncharged.clear()
        self._limit_allowance(vanilla)

    def _limit_allowance(self, vanilla: float) -> None:
        costs = [times.cost for times in self._rounds.values() if times.cost is not None]
        if costs:
            self._allowance = min(self._allowance, RESERVE * max(*costs, vanilla) - RESERVE * vanilla)

    def _best_size(self, room: int) -> int:
        """Return the size with the most tokens per second, or one to measure."""
        sizes = [size for size in self._sizes if size <= room] or [self._sizes[-1]]
        if len(sizes) == 1:
            return sizes[0]
        rates = {}
        for size in sizes:
            times = self._rounds[size]
            if times.cost is None or times.rounds_since >= REVISIT:
                return size
            rates[size] = self._guesses.expected(size) / times.cost
        return max(rates, key=rates.__getitem__)

    def _allows_a_round(self, size: int) -> bool:
        """Return whether the allowance covers another round, if all queued ones lose."""
        times, vanilla = self._rounds[size], self._vanilla.cost
        if vanilla is None or times.cost is None:
            return len(self._queued) + len(times.uncharged) < UNKNOWN and self._allowance >= 0
        return self._allowance >= (1 + len(self._queued)) * (times.cost - vanilla)
