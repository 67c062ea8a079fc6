# SPDX-License-Identifier: Apache-2.0
"""Fallback: decides, from what rounds and vanilla steps cost and yield, whether to draft.

  trial      8 rounds are measured, 2 if the last trial failed, and 3 vanilla steps unless their time is known
  drafting   as long as a round yields more tokens than vanilla steps yield in its time
  pause      vanilla steps, four times as many with each trial that fails; then the next trial

Times are known from earlier batches of the same size. The number of tokens of a round depends on the text, so
it is measured again for every prompt.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import fmean, median

TRIAL, SHORT_TRIAL = 8, 2  # rounds
PROBE = 3  # vanilla steps
REFRESH = 1024  # rounds until vanilla steps are measured again
FIRST_PAUSE, LONGEST_PAUSE = 32, 2048  # vanilla steps
LONGER = 4  # times as long as the pause before
MEASUREMENTS = 9  # of which the median counts: the first step of a kind also binds tensors


class Fallback:
    """Chooses the kind of each step; `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[tuple[int, bool], deque[float]] = {}  # of steps, by batch size and kind
        self._last = 0.0
        self._batch = 0
        self._until_refresh = REFRESH
        self._trial = TRIAL
        self.new_text()

    def new_text(self) -> None:
        """Begin a trial: a prompt has joined the batch."""
        self._tokens: deque[float] = deque(maxlen=2 * TRIAL)  # of rounds, for each sequence on average
        self._vanilla_left = 0  # of a probe or a pause
        self._pause = FIRST_PAUSE

    def begin(self, batch: int) -> None:
        """Begin to measure steps of so many sequences."""
        self._batch = batch
        self._last = self._clock()

    def drafts(self) -> bool:
        """Return whether the next step is a round of drafting; called once for each step."""
        if not self._vanilla_left:
            self._vanilla_left = self._next_vanilla_steps()
        if self._vanilla_left:
            self._vanilla_left -= 1
            return False
        self._until_refresh -= 1
        return True

    def delivered(self, drafted: bool, tokens: float) -> None:
        """Measure a step that has been delivered; tokens: of each sequence, on average."""
        now = self._clock()
        times = self._seconds.setdefault((self._batch, drafted), deque(maxlen=MEASUREMENTS))
        times.append(now - self._last)
        self._last = now
        if drafted:
            self._tokens.append(tokens)

    def _next_vanilla_steps(self) -> int:
        """Return how many vanilla steps to do before the next round."""
        if len(self._tokens) < self._trial:
            return 0
        vanilla = self._seconds.get((self._batch, False), ())
        if len(vanilla) < PROBE or self._until_refresh <= 0:
            self._until_refresh = REFRESH
            return PROBE
        drafted = self._seconds.get((self._batch, True))
        if not drafted or fmean(self._tokens) * median(vanilla) > median(drafted):
            self._trial, self._pause = TRIAL, FIRST_PAUSE
            return 0
        self._trial = SHORT_TRIAL
        steps, self._pause = self._pause, min(LONGER * self._pause, LONGEST_PAUSE)
        self._tokens.clear()
        return steps
