# SPDX-License-Identifier: Apache-2.0
"""TurnClocks: the seconds of the stages of turns and of their requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from edgellm_ros.engine.device import Mark
from edgellm_ros.runtime.metrics import RuntimeMetrics, StageClock
from edgellm_ros.runtime.scheduling.entry import Entry


class Clocks:
    """Measures a stage of several clocks with one mark."""

    def __init__(self, mark: Callable[[], Mark], *clocks: StageClock) -> None:
        self._mark = mark
        self._clocks = clocks

    def end(self, stage: str) -> None:
        """End a stage after the work queued so far."""
        mark = self._mark()
        for clock in self._clocks:
            clock.end(stage, mark)


class TurnClocks:
    """Makes clocks, and counts the seconds of turns in the runtime's metrics.

    lag: the last turns, whose seconds are counted later, since the device may still have work of theirs.
    """

    def __init__(self, mark: Callable[[], Mark], metrics: RuntimeMetrics, lag: int) -> None:
        self._mark, self._metrics, self._lag = mark, metrics, lag
        self._turn = self.new()
        self._unread: deque[StageClock] = deque()

    def new(self) -> StageClock:
        """Return a clock that begins now."""
        return StageClock(self._mark)

    def begin_turn(self) -> None:
        """Begin to measure a turn."""
        self._turn = self.new()
        self._unread.append(self._turn)

    def of(self, *entries: Entry) -> Clocks:
        """Return what measures stages of the turn and of these requests, which have begun."""
        return Clocks(self._mark, *(entry.stages for entry in entries), self._turn)

    def end_turn(self, is_last: bool) -> None:
        """Count the seconds of turns; of all after the last one.

        EngineError if some of their work failed.
        """
        while len(self._unread) > (0 if is_last else self._lag):
            self._metrics.add_seconds(self._unread.popleft().metrics())
