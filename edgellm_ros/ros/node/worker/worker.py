# SPDX-License-Identifier: Apache-2.0
"""The planning threads, each of which runs one job after another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Set

from edgellm_ros.ros.node.worker.job import ERROR, PREEMPTED, SKIPPED, TIMEOUT, Job, Outcome
from edgellm_ros.ros.node.worker.schedule import Schedule

LOOK_S = 0.3  # between two looks at goals that wait: places are kept for driving for some time only


class PlanWorker:
    """Runs `plan(job) -> Outcome` on threads of its own, up to `most` jobs at once.

    With `most` above 1 a job of driving starts beside them (`Schedule`). Neither `plan` nor `on_done` may
    raise; both are called on any of the threads. `driving_plans_per_goal` returns the present share of
    driving (`Schedule.take`). Jobs of topics are those of driving.
    """

    def __init__(
        self,
        plan: Callable[[Job], Outcome],
        queue_size: int,
        driving_plans_per_goal: Callable[[], int] = lambda: 1,
        most: int = 1,
    ) -> None:
        self._plan = plan
        self._queue_size = queue_size
        self._driving_plans_per_goal = driving_plans_per_goal
        self._changed = threading.Condition()
        self._schedule = Schedule(most)
        self._closed = False
        count = most + (most > 1)
        self._threads = [threading.Thread(target=self._run, name=f"edgellm-plan-{i}") for i in range(count)]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """Number of goals in the queue."""
        with self._changed:
            return sum(job.is_plan for job in self._schedule.goals)

    @property
    def orphaned(self) -> int:
        """Number of goals in the queue whose client has left."""
        with self._changed:
            return sum(job.client in self._schedule.gone for job in self._schedule.goals if job.is_plan)

    @property
    def clients(self) -> set[str]:
        """The known clients of the goals in the queue."""
        with self._changed:
            return {job.client for job in self._schedule.goals if job.client}

    def started(self, kind: str) -> int:
        """Return the number of jobs of a class started so far; kind: DRIVING or GOALS."""
        return self._schedule.started[kind]

    def running(self, kind: str) -> int:
        """Return the number of jobs of a class that run; kind: DRIVING or GOALS."""
        with self._changed:
            return sum(job.kind == kind for job in self._schedule.running)

    @property
    def pending(self) -> int:
        """Number of jobs that wait or run.

        At 0, `on_done` of every earlier job has returned.
        """
        with self._changed:
            schedule = self._schedule
            return len(schedule.goals) + (schedule.driving is not None) + len(schedule.running)

    def is_full(self, client: str = "") -> bool:
        """Return whether the queue has no room for another goal of a client.

        A goal that can start at once needs no room.
        """
        with self._changed:
            return self._schedule.would_wait(client, time.monotonic()) > self._queue_size

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def submit_goal(self, job: Job) -> None:
        """Append a job to the queue.

        The caller has checked `is_full`, or called `make_room`.
        """
        with self._changed:
            self._schedule.goals.append(job)
            self._changed.notify_all()

    def make_room(self, client: str) -> bool:
        """Make room for a goal of a client; False if the queue stays full.

        A goal of a client that has left, or of one with more goals in the queue, may end for it.
        """
        with self._changed:
            if not self.is_full(client):
                return True
            displaced = self._schedule.displaced_by(client)
            if displaced is None:
                return False
            self._drop(displaced)
            has_left = displaced.client in self._schedule.gone
        why = "its client has left" if has_left else "a client with fewer goals in it sent another"
        displaced.on_done(Outcome(ERROR, f"the queue is full, and {why} (parameter queue_size)"))
        return True

    def set_gone(self, clients: Set[str]) -> None:
        """Queue goals of clients that have left after all other goals."""
        with self._changed:
            self._schedule.gone = clients

    def submit_topic(self, job: Job, preempt: bool) -> None:
        """Replace the waiting topic job.

        `preempt` true: the job carries a newer command; the replaced and the running topic job end as
        PREEMPTED. False: the job carries a newer frame; the replaced job ends as SKIPPED, the running one
        goes on.
        """
        job.is_driving = True
        with self._changed:
            replaced, self._schedule.driving = self._schedule.driving, job
            job.is_command = preempt or (replaced is not None and replaced.is_command)
            if preempt:
                self._stop_driving("a newer command arrived")
            self._changed.notify_all()
        if replaced is not None:
            skipped = Outcome(SKIPPED, "a newer frame arrived")
            replaced.on_done(Outcome(PREEMPTED, "a newer command arrived") if preempt else skipped)

    def stop_topic(self, message: str) -> None:
        """End the running topic job and drop the waiting one."""
        with self._changed:
            dropped, self._schedule.driving = self._schedule.driving, None
            self._stop_driving(message)
        if dropped is not None:
            dropped.on_done(Outcome(PREEMPTED, message))

    def stop(self, job: Job, reason: str, message: str) -> None:
        """End one job: at once if it waits, else at the next token or Euler step."""
        with self._changed:
            waits = job in self._schedule.goals
            if waits:
                self._drop(job)
            else:
                job.stop(reason, message)
        if waits:
            job.on_done(Outcome(reason, message))

    def stop_all(self, reason: str, message: str, timeout_s: float) -> bool:
        """End every plan and wait until none runs; after `close`, end every job.

        False if a running job did not end in time.
        """
        with self._changed:
            schedule = self._schedule
            dropped = [job for job in schedule.goals if job.is_plan or self._closed]
            schedule.goals = [job for job in schedule.goals if job not in dropped]
            if schedule.driving is not None:
                dropped.append(schedule.driving)
                schedule.driving = None
            for job in self._plans_that_run():
                job.stop(reason, message)
        for job in dropped:
            job.on_done(Outcome(reason, message))
        with self._changed:
            return self._changed.wait_for(lambda: not self._plans_that_run(), timeout_s)

    def close(self) -> None:
        """End every job and the threads.

        Blocks until the next token or Euler step of the running jobs.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.stop_all(PREEMPTED, "the node shuts down", timeout_s=0.0)
        for thread in self._threads:
            thread.join()

    def expire(self) -> None:
        """End the waiting goals whose time is over.

        To be called regularly, also while jobs run.
        """
        with self._changed:
            now = time.monotonic()
            expired = [job for job in self._schedule.goals if now >= job.deadline]
            for job in expired:
                self._drop(job)
        for job in expired:
            job.on_done(Outcome(TIMEOUT, f"waited {job.timeout_s:g} s for other plans"))

    def _drop(self, goal: Job) -> None:
        """Remove a waiting goal, which others may have waited for."""
        self._schedule.goals.remove(goal)
        self._changed.notify_all()

    def _plans_that_run(self) -> list[Job]:
        return [job for job in self._schedule.running if job.is_plan]

    def _stop_driving(self, message: str) -> None:
        for job in self._schedule.running:
            if job.is_driving:
                job.stop(PREEMPTED, message)

    def _run(self) -> None:
        while True:
            with self._changed:
                job = self._take()
                while job is None and not self._closed:
                    self._changed.wait(LOOK_S if self._schedule.goals else None)
                    job = self._take()
                if job is None:
                    return
            job.started = time.monotonic()
            job.check_time()
            job.on_done(job.stopped or self._plan(job))
            with self._changed:
                self._schedule.end(job, time.monotonic())
                self._changed.notify_all()
            del job  # frees its frames while the thread waits

    def _take(self) -> Job | None:
        """Take the next job; None if none may start, or after `close`."""
        if self._closed:
            return None
        return self._schedule.take(self._driving_plans_per_goal(), time.monotonic())
