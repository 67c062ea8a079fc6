# SPDX-License-Identifier: Apache-2.0
"""StepSizes: how many tokens the next step verifies, 1 being a vanilla step.

The next step has the size with the most expected tokens per second:

  tokens   1 + p1 + p1 p2 + ..., where pk is how often guess k was right after k - 1 right ones
  seconds  a low quantile of the last steps of this size, as other load on the machine takes time too;
           for a size that had none, on the line between those of the sizes around it

Evidence ages: that of guesses with each step, less with vanilla steps, which bring none. Without evidence pk
is p(k-1), and p1 is PRIOR. So a text that could not be guessed gets a round again after some vanilla steps:
later, the more rounds cost. A size without a step for REVISIT steps is measured again, then after twice as
many, up to REVISIT times its cost in vanilla steps; then one fast step is enough for a low cost.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

MEASUREMENTS = 64  # last ones of a size
QUANTILE = 8  # the cost is the least of fewer measurements, the second of at least as many, ...
UNKNOWN = 2  # steps until the cost of a size is known: the first one also binds tensors
REVISIT = 150  # steps until a size that is not chosen is measured again, the first time
PRIOR = 0.8  # how often the first guess is right, without evidence
PRIOR_WEIGHT = 1.0  # guesses
KEPT = 0.93  # of earlier evidence with each round
KEPT_BY_VANILLA = 0.98  # with each vanilla step


class StepTimes:
    """Seconds of the steps of one size and batch size."""

    def __init__(self) -> None:
        self.steps = 0
        self.idle = 0  # steps of other sizes since the last one of this size was chosen
        self.wait: float = REVISIT  # of them until it is measured again
        self._seconds: deque[float] = deque(maxlen=MEASUREMENTS)

    def add(self, seconds: float) -> None:
        """Measure a step; the first one does not count."""
        self.steps += 1
        if self.steps >= UNKNOWN:
            self._seconds.append(seconds)

    def keep_lowest(self) -> None:
        """Keep a few low measurements, so that one step may lower the cost."""
        self._seconds = deque(sorted(self._seconds)[: QUANTILE - 2], MEASUREMENTS)

    @property
    def cost(self) -> float | None:
        """Seconds of a step; None = not known.

        Not their minimum: on a GPU a step that is delivered late makes the next one look short.
        """
        return sorted(self._seconds)[len(self._seconds) // QUANTILE] if self._seconds else None


class Guesses:
    """How often each of the `most` guesses of a round is right after right ones."""

    def __init__(self, most: int) -> None:
        self._right, self._all = np.zeros(most), np.zeros(most)

    def add(self, counts: Sequence[int], size: int) -> None:
        """Add a step with `size` tokens at most.

        counts: tokens that it has yielded, of each sequence.
        """
        kept = KEPT if size > 1 else KEPT_BY_VANILLA
        self._right *= kept
        self._all *= kept
        for count in counts:
            self._right[: count - 1] += 1 / len(counts)
            self._all[: min(count, size - 1)] += 1 / len(counts)

    def expected(self) -> list[float]:
        """Return the expected tokens of rounds with 0, 1, 2, ... guesses."""
        tokens, chance, probability = [1.0], 1.0, PRIOR
        for right, count in zip(self._right.tolist(), self._all.tolist(), strict=True):
            probability = (right + PRIOR_WEIGHT * probability) / (count + PRIOR_WEIGHT)
            chance *= probability
            tokens.append(tokens[-1] + chance)
        return tokens


class StepSizes:
    """Chooses the size of each step.

    - sizes: of rounds, rising; a round of size n has n - 1 guesses, or `most` if this is less
    - clock: returns seconds
    """

    def __init__(
        self, sizes: Sequence[int], most: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._sizes = [1, *sizes]
        self._most = most
        self._clock = clock
        self._times_of_batches: dict[int, dict[int, StepTimes]] = {}
        self._guesses = Guesses(most)
        self.begin(0)

    def begin(self, batch: int) -> None:
        """Begin to measure steps of this batch size; no step may be queued."""
        new = {size: StepTimes() for size in self._sizes}
        self._times = self._times_of_batches.setdefault(batch, new)
        self._queued: deque[int] = deque()  # sizes
        self._last = self._clock()

    def next_size(self, room: int) -> int:
        """Return the most tokens of the next step; called once for each step.

        room: the most tokens that it may have. A round with less room than the smallest size of rounds counts
        as one of that size.
        """
        sizes = [size for size in self._sizes if size <= room]
        if len(sizes) == 1 < room:
            sizes = self._sizes[:2]
        size = self._size_to_measure(sizes)
        if size is None:
            size = self._best_size(sizes)
            self._times[size].wait = REVISIT
        for times in self._times.values():
            times.idle += 1
        self._times[size].idle = 0
        self._queued.append(size)
        return min(size, room)

    def delivered(self, counts: Sequence[int]) -> None:
        """Measure a step that has been delivered.

        counts: tokens of its sequences that have not ended, whose last round may be cut off.
        """
        now, size = self._clock(), self._queued.popleft()
        seconds, self._last = now - self._last, now
        self._times[size].add(seconds)
        self._guesses.add(counts, size)

    def _size_to_measure(self, sizes: Sequence[int]) -> int | None:
        for size in (sizes[0], sizes[-1]):  # those between are interpolated
            times = self._times[size]
            if times.cost is None and self._queued.count(size) < max(UNKNOWN - times.steps, 1):
                return size
        vanilla = self._times[1].cost or math.inf
        for size in sizes:
            times = self._times[size]
            if times.idle >= times.wait:
                times.wait = max(REVISIT, min(2 * times.wait, REVISIT * (times.cost or 0.0) / vanilla))
                times.keep_lowest()
                return size
        return None

    def _best_size(self, sizes: Sequence[int]) -> int:
        known = [(size, cost) for size in sizes if (cost := self._times[size].cost) is not None]
        if not known:
            return 1
        tokens = self._guesses.expected()
        possible = [size for size in sizes if known[0][0] <= size <= known[-1][0]]
        costs = np.interp(possible, [size for size, _ in known], [cost for _, cost in known]).tolist()
        rates = {
            size: tokens[min(size - 1, self._most)] / cost for size, cost in zip(possible, costs, strict=True)
        }
        return max(rates, key=rates.__getitem__)
