# SPDX-License-Identifier: Apache-2.0
"""Encoding: what requests need of the encoders before their prompts.

On a device that runs engines beside each other, one run at a time is on a thread of its own, while the others
have steps. What belongs to the scheduler stays on its thread: progress is reported, and the next run is
chosen, between two steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgellm_ros.runtime.encoders import Encoders
from edgellm_ros.runtime.metrics import Clock, MultimodalMetrics
from edgellm_ros.runtime.scheduling.encoder_thread import EncodedRun, EncoderThread
from edgellm_ros.runtime.scheduling.entry import Entry

MOST_INTERRUPTS = 3  # of a run: beside a robot that drives all the time it is completed at last


class Encoding:
    """The runs of encoders; not thread-safe.

    `thread`: None = runs are computed where they begin.
    """

    def __init__(self, encoders: Encoders, thread: EncoderThread | None, metrics: MultimodalMetrics) -> None:
        self.current: Entry | None = None  # whose run is on the thread
        self._encoders = encoders
        self._thread = thread
        self._metrics = metrics

    @property
    def is_busy(self) -> bool:
        """Whether the thread has a run."""
        return self._thread is not None and self._thread.is_busy

    def begin(self, entry: Entry, clock: Clock) -> None:
        """Begin to encode what the prompt of a request needs.

        Without a thread, all of it is computed now.
        """
        entry.runs = self._encoders.runs(entry.sequence)
        self._advance(entry)
        while self._thread is None and entry.run is not None:
            entry.run.compute()
            clock.end(f"{entry.run.stage}_s")
            self._advance(entry)

    def take(self) -> tuple[Entry, EncodedRun] | None:
        """Return the request whose run has ended, and how, once.

        None if no run has ended, or if it was that of a request without a row.
        """
        ended = self._thread.take() if self._thread is not None else None
        if ended is None:
            return None
        self._metrics.seconds += ended.seconds
        entry, self.current = self.current, None
        return None if entry is None else (entry, ended)

    def lacks(self, entry: Entry) -> bool:
        """Return whether the prompt of a request needs what is not encoded."""
        return any(run.is_new for run in self._encoders.runs(entry.sequence))

    def go_on(self, entry: Entry, ended: EncodedRun) -> None:
        """Go on to the next run of a request after one has ended.

        An interrupted run is the next one again. Raises the error of one that has failed.
        """
        assert entry.run is not None
        if ended.error is not None and ended.interrupted:
            entry.interrupts += 1
            return
        if ended.error is not None:
            raise ended.error
        entry.stages.end(f"{entry.run.stage}_s")
        self._advance(entry)

    def start_next(self, wanted: Sequence[Entry]) -> None:
        """Start the run of the first request of `wanted`, if the thread is free.

        The run of a request that is not among them is interrupted, to be computed again, unless this has
        happened MOST_INTERRUPTS times.
        """
        if self._thread is None:
            return
        if self.current is not None and self.current not in wanted:
            if self.current.interrupts < MOST_INTERRUPTS:
                self._thread.interrupt()
        elif wanted and not self._thread.is_busy:
            self.current = wanted[0]
            assert self.current.run is not None
            self._thread.start(self.current.run.compute)

    def drop(self, entry: Entry) -> None:
        """Forget the runs of a request that loses its row."""
        entry.run = None
        if entry is self.current and self._thread is not None:
            self.current = None
            self._thread.interrupt()

    def wait(self) -> None:
        """Wait for the run of a request that has lost its row.

        So others may use the encoders.
        """
        if self._thread is not None:
            self._thread.wait()

    def _advance(self, entry: Entry) -> None:
        """Report progress up to the next run that is to be computed."""
        entry.run, entry.interrupts = None, 0
        for run in entry.runs:
            if not entry.sequence.report(run.stage, run.step):
                return
            if run.is_new:
                entry.run = run
                return
