# SPDX-License-Identifier: Apache-2.0
"""Guard: the work of requests with a row, and what follows if it fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgellm_ros.engine.errors import DeviceLostError
from edgellm_ros.runtime.metrics import SchedulingMetrics
from edgellm_ros.runtime.pipeline import Pipeline
from edgellm_ros.runtime.scheduling.entry import Entry
from edgellm_ros.runtime.scheduling.keeping import NextTurn
from edgellm_ros.runtime.stages.recovery import drop_after, recover_after


class Guard:
    """Does work of requests; those whose work fails end, and the others go on.

    - running: the requests with a row
    - turns: next turns of conversations, which have rows too
    - free, free_turn: take the row of a request, or of a next turn
    """

    def __init__(
        self,
        pipeline: Pipeline,
        metrics: SchedulingMetrics,
        running: Sequence[Entry],
        turns: Sequence[NextTurn],
        *,
        free: Callable[[Entry], None],
        free_turn: Callable[[NextTurn], None],
    ) -> None:
        self._pipeline, self._metrics = pipeline, metrics
        self._running, self._turns = running, turns
        self._free, self._free_turn = free, free_turn
        self._failed: dict[Entry, Exception] = {}  # by `run_beside`

    @property
    def has_failed(self) -> bool:
        """Whether work of a request has failed while a step was queued."""
        return bool(self._failed)

    def run(self, entries: Sequence[Entry], work: Callable[[], int | None]) -> int:
        """Do work of some requests, which fail if it fails; return what `work` returns."""
        try:
            return work() or 0
        except DeviceLostError as error:
            self.fail_all(error)
        except Exception as error:
            self.drop([entry for entry in entries if entry in self._running], error)
        return 0

    def run_beside(self, entry: Entry, work: Callable[[], int | None]) -> int:
        """Do work of a request while a step is queued; return what `work` returns.

        If it fails, the request fails after the step: its row stays until then, and takes no more tokens.
        """
        try:
            return work() or 0
        except DeviceLostError:
            raise
        except Exception as error:
            self._failed[entry] = error
            entry.sequence.finish_reason, entry.prompts = "cancelled", None
        return 0

    def drop_failed(self) -> None:
        """Fail the requests whose work has failed beside a step; no step may be queued."""
        failed, self._failed = self._failed, {}
        for entry, error in failed.items():
            if entry in self._running:
                self.drop([entry], error)

    def drop(self, entries: Sequence[Entry], error: Exception, turn: NextTurn | None = None) -> None:
        """Fail requests, and free their rows, and that of a next turn."""
        sequences = [entry.sequence for entry in entries]
        if turn is not None and turn.sequence is not None:
            sequences.append(turn.sequence)
        try:
            drop_after(self._pipeline, sequences, error)
        except Exception as consequence:
            self.fail_all(consequence)
            return
        for entry in entries:
            self._free(entry)
            self._fail(entry, error)

    def fail_all(self, error: Exception) -> None:
        """Fail all requests with a row, and clear the batch."""
        self._failed = {}
        try:
            recover_after(self._pipeline, error)
        finally:
            for turn in list(self._turns):
                self._free_turn(turn)
            for entry in list(self._running):
                self._free(entry)
                self._fail(entry, error)

    def _fail(self, entry: Entry, error: Exception) -> None:
        entry.fail(error)
        self._metrics.failed += 1
