# SPDX-License-Identifier: Apache-2.0
"""EncoderThread: runs encoders beside decode steps, one image at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class EncodedRun:
    """The end of a run.

    - seconds: that it took
    - error: why it failed, None = it did not
    - interrupted: whether it was told to fail
    """

    seconds: float
    error: Exception | None = None
    interrupted: bool = False


class Interruptible(Protocol):
    """What computes the runs (`Encoders`)."""

    def interrupt(self) -> None:
        """Let runs fail soon, until `resume`."""
        ...

    def resume(self) -> None:
        """Undo `interrupt`."""
        ...


class EncoderThread:
    """A thread that computes runs of encoders; the first run starts it.

    One other thread calls its methods. `changed` is called on this one when a run has ended.
    """

    def __init__(self, encoders: Interruptible, changed: Callable[[], None]) -> None:
        self._encoders = encoders
        self._changed = changed
        self._condition = threading.Condition()
        self._run: Callable[[], None] | None = None  # to be computed, or under way
        self._ended: EncodedRun | None = None
        self._interrupted = self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a run has not ended, or its end was not taken."""
        with self._condition:
            return self._run is not None or self._ended is not None

    def start(self, run: Callable[[], None]) -> None:
        """Begin a run; the thread must not be busy."""
        with self._condition:
            assert self._run is None
            assert self._ended is None
            self._run = run
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="edgellm-encoders", daemon=True)
                self._thread.start()
            self._condition.notify_all()

    def interrupt(self) -> None:
        """Let the run that is under way fail soon."""
        with self._condition:
            if self._run is not None and not self._interrupted:
                self._interrupted = True
                self._encoders.interrupt()

    def take(self) -> EncodedRun | None:
        """Return how the last run has ended, once; None if none has."""
        with self._condition:
            ended, self._ended = self._ended, None
            return ended

    def wait(self) -> None:
        """Wait until nothing runs, and forget how the last run has ended."""
        with self._condition:
            self._condition.wait_for(lambda: self._run is None)
            self._ended = None

    def close(self) -> None:
        """End the thread; waits for an interrupted run."""
        self.interrupt()
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while (run := self._next()) is not None:
            start, error = time.perf_counter(), None
            try:
                run()
            except Exception as failure:  # of one request: the scheduler ends it
                error = failure
            with self._condition:
                self._run = None
                self._ended = EncodedRun(time.perf_counter() - start, error, self._interrupted)
                if self._interrupted:
                    self._interrupted = False
                    self._encoders.resume()
                self._condition.notify_all()
            self._changed()

    def _next(self) -> Callable[[], None] | None:
        """Wait for a run; None once the thread is to end."""
        with self._condition:
            self._condition.wait_for(lambda: self._run is not None or self._closing)
            return None if self._closing else self._run
