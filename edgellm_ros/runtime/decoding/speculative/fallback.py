# SPDX-License-Identifier: Apache-2.0
"""Fallback: decides whether to draft, by what rounds and steps cost and yield.

The steps are vanilla steps. The gain of a round, which may be negative, is the time that vanilla steps would
take for its tokens, less its own time, less the extra time of the first vanilla step after a round. Gains and
a share of the time that vanilla steps would have taken are added to an allowance. A round is allowed if the
allowance covers the loss of a round whose guesses are all wrong:

  steps       | good rounds         | bad rounds | vanilla steps | a round | vanilla steps | ...
  allowance   | stays at its limit  | falls      | grows slowly  | falls   | grows slowly  |

So over the life of a runtime rounds lose at most this share, whatever a round costs, except for the first
ones of each batch size, whose cost is not known. The limit of the allowance is what a few bad rounds lose, so
a text that cannot be guessed stops drafting soon, and an unlucky round in a good text does not.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

SHARE = 0.02  # of the time of vanilla steps that rounds may lose
RESERVE = 8  # bad rounds that the largest allowance covers
UNKNOWN = 2  # rounds until the cost of a round is known
PROBE = 3  # vanilla steps until their cost is known
REFRESH = 1024  # rounds until vanilla steps are measured again
MEASUREMENTS = 9  # whose median is the cost
OUTLIER = 2  # medians: the longest time of a step; what exceeds it has another cause


class StepTimes:
    """Seconds of the steps of one kind and batch size."""

    def __init__(self) -> None:
        self.steps = 0
        self._seconds: deque[float] = deque(maxlen=MEASUREMENTS)

    def add(self, seconds: float) -> None:
        """Measure a step.

        The first one of a kind also binds tensors, so its time does not count.
        """
        self.steps += 1
        if self.steps > 1:
            self._seconds.append(seconds)

    @property
    def cost(self) -> float | None:
        """Seconds of a step; None = not known."""
        return median(self._seconds) if self._seconds else None


class Fallback:
    """Chooses the kind of each step; `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._times: dict[tuple[int, bool], StepTimes] = {}  # by batch size and kind
        self._allowance = 0.0
        self._until_refresh = REFRESH
        self._probe = 0  # vanilla steps that are left of a probe
        self.begin(0)

    def begin(self, batch: int) -> None:
        """Begin to measure steps of this batch size; no step may be queued."""
        self._vanilla = self._times.setdefault((batch, False), StepTimes())
        self._round = self._times.setdefault((batch, True), StepTimes())
        self._queued_rounds = 0
        self._uncharged: list[float] = []  # tokens of rounds that were delivered before their cost was known
        self._after_round = False
        self._last = self._clock()

    def drafts(self) -> bool:
        """Return whether the next step is a round of drafting; called once for each step."""
        if self._probe:
            self._probe -= 1
            return False
        if self._vanilla.cost is None or self._until_refresh <= 0:
            self._until_refresh = REFRESH
            self._probe = PROBE - 1
            return False
        if not self._allows_a_round():
            return False
        self._queued_rounds += 1
        self._until_refresh -= 1
        return True

    def delivered(self, drafted: bool, tokens: float) -> None:
        """Measure a step that has been delivered; tokens: of each sequence, on average."""
        now, after_round = self._clock(), self._after_round
        seconds, self._last, self._after_round = now - self._last, now, drafted
        known = self._round.cost is not None
        (self._round if drafted else self._vanilla).add(seconds)
        if drafted:
            self._queued_rounds -= 1
            self._uncharged.append(tokens)
        vanilla, cost = self._vanilla.cost, self._round.cost
        if vanilla is None:
            return
        if not drafted:
            self._allowance += SHARE * vanilla
            if after_round:
                self._allowance -= max(min(seconds, OUTLIER * vanilla) - vanilla, 0.0)
        elif cost is not None:
            taken = min(seconds, OUTLIER * cost) if known else cost
            for yielded in self._uncharged:
                self._allowance += (1 + SHARE) * yielded * vanilla - taken
            self._uncharged.clear()
        if cost is not None:
            self._allowance = min(self._allowance, RESERVE * max(cost - vanilla, 0.0))

    def _allows_a_round(self) -> bool:
        """Return whether the allowance covers another round, if all queued ones lose."""
        vanilla, cost = self._vanilla.cost, self._round.cost
        if vanilla is None or cost is None:
            return self._queued_rounds + len(self._uncharged) < UNKNOWN and self._allowance >= 0
        return self._allowance >= (1 + self._queued_rounds) * (cost - vanilla)
