# SPDX-License-Identifier: Apache-2.0
"""One request to the planning threads, and how it ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

COMPLETED, CANCELLED, PREEMPTED = "completed", "cancelled", "preempted"
TIMEOUT, STALE_INPUT, ERROR = "timeout", "stale_input", "error"
SKIPPED = "skipped"  # a waiting frame that a newer one replaced: not a plan
DRIVING, GOALS = "driving", "goals"  # the classes of jobs


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    reason: str  # one of the constants above
    message: str = ""  # empty if completed
    result: Any = None


@dataclass(eq=False)
class Job:
    """One request in the worker. Times are those of `time.monotonic`."""

    request: Any
    timeout_s: float  # from arrival to result
    on_done: Callable[[Outcome], None]  # called once, by the worker or by the thread that stops the job
    on_progress: Callable[[Any], None] = lambda progress: None
    arrival: float = field(default_factory=time.monotonic)
    started: float = 0.0
    is_plan: bool = True  # False for other work in the queue, which `stop_all` leaves there
    runs_alone: bool = False  # while no plan runs: it changes the runtime for all
    is_driving: bool = False  # a command or a camera frame, not a goal
    is_command: bool = False  # of driving: a command, or a frame that replaced a waiting command
    client: str = ""  # of a goal: who sent it; "" = unknown
    priority: int = 0  # of a goal: its client's
    level: int = 0  # set by the schedule: the priority among the plans that run
    on_raised: Callable[[int], None] = lambda level: None  # called when the level rises while the job runs
    cancel: threading.Event = field(default_factory=threading.Event)
    stopped: Outcome | None = None  # the outcome to end with, after `stop`

    @property
    def kind(self) -> str:
        """The class of the job: DRIVING or GOALS."""
        return DRIVING if self.is_driving else GOALS

    @property
    def deadline(self) -> float:
        """When the time of the job is over; may be infinite."""
        return self.arrival + self.timeout_s

    def stop(self, reason: str, message: str) -> None:
        """End the job at the next token or Euler step. The first reason counts."""
        if self.stopped is None:
            self.stopped = Outcome(reason, message)
        self.cancel.set()

    def raise_level(self, level: int) -> None:
        """Raise the level of the running job."""
        if level > self.level:
            self.level = level
            self.on_raised(level)

    def report(self, progress: Any) -> None:
        """Report progress while the job runs; stop the job if its time is over."""
        self.check_time()
        self.on_progress(progress)

    def check_time(self) -> None:
        """Stop the job if its time is over."""
        if time.monotonic() >= self.deadline:
            self.stop(TIMEOUT, f"no result within {self.timeout_s:g} s")
