# SPDX-License-Identifier: Apache-2.0
"""The planning thread and its queue.

One job runs; behind it wait a bounded queue of goals and one topic request. Goals run in the order of their
arrival. A topic request (from ~/command or ~/image) runs when no goal waits; only the newest one is stored.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

COMPLETED, CANCELLED, PREEMPTED = "completed", "cancelled", "preempted"
TIMEOUT, STALE_INPUT, ERROR = "timeout", "stale_input", "error"
SKIPPED = "skipped"  # a waiting frame that a newer one replaced: not a plan


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
    cancel: threading.Event = field(default_factory=threading.Event)
    stopped: Outcome | None = None  # the outcome to end with, after `stop`

    def stop(self, reason: str, message: str) -> None:
        """End the job at the next token or Euler step. The first reason counts."""
        if self.stopped is None:
            self.stopped = Outcome(reason, message)
        self.cancel.set()

    def report(self, progress: Any) -> None:
        """Report progress while the job runs; stop the job if its time is over."""
        self.check_time()
        self.on_progress(progress)

    def check_time(self) -> None:
        """Stop the job if its time is over."""
        if time.monotonic() - self.arrival > self.timeout_s:
            self.stop(TIMEOUT, f"no result within {self.timeout_s:g} s")


class PlanWorker:
    """Runs `plan(job) -> Outcome` on its own thread, one job at a time.

    Neither `plan` nor `on_done` may raise.
    """

    def __init__(self, plan: Callable[[Job], Outcome], queue_size: int) -> None:
        self._plan = plan
        self._queue_size = queue_size
        self._changed = threading.Condition()
        self._goals: deque[Job] = deque()
        self._topic: Job | None = None
        self._running: Job | None = None
        self._running_is_topic = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="edgellm-plan")
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Number of goals in the queue."""
        with self._changed:
            return sum(job.is_plan for job in self._goals)

    @property
    def pending(self) -> int:
        """Number of jobs that wait or run.

        At 0, all outputs of earlier jobs have been published.
        """
        with self._changed:
            return len(self._goals) + (self._topic is not None) + (self._running is not None)

    @property
    def is_full(self) -> bool:
        """Whether the queue has no room for another goal.

        A goal with no plan before it needs no room.
        """
        with self._changed:
            waiting = self.waiting
            idle = waiting == 0 and (self._running is None or not self._running.is_plan)
            return not idle and waiting >= self._queue_size

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def submit_goal(self, job: Job) -> None:
        """Append a job to the queue. The caller has checked `is_full`."""
        with self._changed:
            self._goals.append(job)
            self._changed.notify()

    def submit_topic(self, job: Job, preempt: bool) -> None:
        """Replace the waiting topic job.

        `preempt` true: the job carries a newer command; the replaced and the running topic job end as
        PREEMPTED. False: the job carries a newer frame; the replaced job ends as SKIPPED, the running one
        goes on.
        """
        with self._changed:
            replaced, self._topic = self._topic, job
            if preempt and self._running is not None and self._running_is_topic:
                self._running.stop(PREEMPTED, "a newer command arrived")
            self._changed.notify()
        if replaced is not None:
            skipped = Outcome(SKIPPED, "a newer frame arrived")
            replaced.on_done(Outcome(PREEMPTED, "a newer command arrived") if preempt else skipped)

    def stop_topic(self, message: str) -> None:
        """End the running topic job and drop the waiting one."""
        with self._changed:
            dropped, self._topic = self._topic, None
            if self._running is not None and self._running_is_topic:
                self._running.stop(PREEMPTED, message)
        if dropped is not None:
            dropped.on_done(Outcome(PREEMPTED, message))

    def stop(self, job: Job, reason: str, message: str) -> None:
        """End one job: at once if it waits, else at the next token or Euler step."""
        with self._changed:
            waits = job in self._goals
            if waits:
                self._goals.remove(job)
            else:
                job.stop(reason, message)
        if waits:
            job.on_done(Outcome(reason, message))

    def stop_all(self, reason: str, message: str, timeout_s: float) -> bool:
        """End every plan and wait until none runs; after `close`, end every job.

        False if the running job did not end in time.
        """
        with self._changed:
            dropped = [job for job in self._goals if job.is_plan or self._closed]
            self._goals = deque(job for job in self._goals if job not in dropped)
            if self._topic is not None:
                dropped.append(self._topic)
                self._topic = None
            if self._running is not None and self._running.is_plan:
                self._running.stop(reason, message)
        for job in dropped:
            job.on_done(Outcome(reason, message))
        with self._changed:
            return self._changed.wait_for(
                lambda: self._running is None or not self._running.is_plan, timeout_s
            )

    def close(self) -> None:
        """End every job and the thread.

        Blocks until the next token or Euler step of the running job.
        """
        with self._changed:
            self._closed = True
            self._changed.notify()
        self.stop_all(PREEMPTED, "the node shuts down", timeout_s=0.0)
        self._thread.join()

    def expire(self) -> None:
        """End the waiting goals whose time is over.

        To be called regularly, also while a job runs.
        """
        with self._changed:
            now = time.monotonic()
            expired = [job for job in self._goals if now - job.arrival > job.timeout_s]
            for job in expired:
                self._goals.remove(job)
        for job in expired:
            job.on_done(Outcome(TIMEOUT, f"waited {job.timeout_s:g} s for other plans"))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._goals or self._topic is not None)
                if self._closed:
                    return
                self._running_is_topic = not self._goals
                if self._goals:
                    job = self._goals.popleft()
                else:
                    assert self._topic is not None
                    job, self._topic = self._topic, None
                self._running = job
            job.started = time.monotonic()
            job.check_time()
            job.on_done(job.stopped or self._plan(job))
            del job  # frees its frames while the thread waits
            with self._changed:
                self._running = None
                self._changed.notify_all()
