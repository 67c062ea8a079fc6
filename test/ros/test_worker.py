# SPDX-License-Identifier: Apache-2.0
"""The planning thread's queue, without ROS."""

from __future__ import annotations

import threading
import time

import pytest

from edgellm_ros.ros.node.worker.job import (
    CANCELLED,
    COMPLETED,
    ERROR,
    PREEMPTED,
    SKIPPED,
    TIMEOUT,
    Job,
    Outcome,
)
from edgellm_ros.ros.node.worker.worker import PlanWorker


class Plans:
    """Plans that last until released or stopped, and the outcomes of all jobs."""

    def __init__(self, queue_size: int = 2) -> None:
        self.go = threading.Event()
        self.started = threading.Semaphore(0)
        self.outcomes: list[tuple[str, str]] = []
        self.worker = PlanWorker(self._plan, queue_size)

    def _plan(self, job: Job) -> Outcome:
        self.started.release()
        while not self.go.is_set():
            job.check_time()
            if job.cancel.wait(0.002):
                return job.stopped
        return Outcome(COMPLETED)

    def job(self, name: str, timeout_s: float = 30.0, client: str = "") -> Job:
        return Job(
            name, timeout_s, lambda outcome: self.outcomes.append((name, outcome.reason)), client=client
        )

    def wait(self, count: int) -> list[tuple[str, str]]:
        end = time.monotonic() + 10
        while len(self.outcomes) < count:
            assert time.monotonic() < end, self.outcomes
            time.sleep(0.002)
        return self.outcomes


@pytest.fixture
def plans():
    plans = Plans()
    yield plans
    plans.worker.close()


@pytest.fixture
def busy(plans):
    plans.worker.submit_goal(plans.job("busy"))
    plans.started.acquire()
    return plans


def test_runs_goals_in_their_order(busy):
    for name in "ab":
        busy.worker.submit_goal(busy.job(name))
    busy.go.set()
    assert busy.wait(3) == [("busy", COMPLETED), ("a", COMPLETED), ("b", COMPLETED)]


def test_is_full_only_when_a_goal_would_wait_too_long(plans):
    assert not plans.worker.is_full()
    for name in "abc":
        assert not plans.worker.is_full()
        plans.worker.submit_goal(plans.job(name))
        if name == "a":
            plans.started.acquire()
    assert plans.worker.is_full()


def test_driving_has_the_next_free_slot(busy):
    busy.worker.submit_goal(busy.job("goal"))
    busy.worker.submit_topic(busy.job("frame"), preempt=False)
    busy.go.set()
    assert busy.wait(3) == [("busy", COMPLETED), ("frame", COMPLETED), ("goal", COMPLETED)]


def test_driving_goes_on_beside_clients_that_always_have_a_goal():
    order: list[str] = []

    def again(kind: str) -> Job:
        def done(outcome: Outcome) -> None:
            order.append(kind)
            if len(order) < 60 and kind == "goal":
                worker.submit_goal(again("goal"))
            elif len(order) < 60:
                worker.submit_topic(again("driving"), preempt=False)

        return Job(kind, 30.0, done)

    worker = PlanWorker(lambda job: Outcome(COMPLETED), queue_size=4)
    for _ in range(4):
        worker.submit_goal(again("goal"))
    worker.submit_topic(again("driving"), preempt=False)
    end = time.monotonic() + 10
    while worker.pending and time.monotonic() < end:
        time.sleep(0.002)
    worker.close()
    assert order[5:55].count("driving") == 25


def test_a_goal_of_another_client_takes_the_place_of_a_greedy_one(busy):
    for name in ("a1", "a2"):
        busy.worker.submit_goal(busy.job(name, client="a"))
    assert busy.worker.is_full()
    assert not busy.worker.make_room("a")
    assert busy.worker.make_room("b")
    assert busy.outcomes == [("a2", ERROR)]


@pytest.mark.parametrize("preempt, reason", [(False, SKIPPED), (True, PREEMPTED)])
def test_only_the_newest_topic_job_waits(busy, preempt, reason):
    busy.worker.submit_topic(busy.job("old"), preempt=False)
    busy.worker.submit_topic(busy.job("new"), preempt=preempt)
    busy.go.set()
    assert busy.wait(3) == [("old", reason), ("busy", COMPLETED), ("new", COMPLETED)]


def test_a_command_preempts_the_topic_job_that_runs_but_no_goal(plans):
    plans.worker.submit_topic(plans.job("old"), preempt=True)
    plans.started.acquire()
    plans.worker.submit_topic(plans.job("new"), preempt=True)
    assert plans.wait(1) == [("old", PREEMPTED)]
    plans.started.acquire()
    plans.go.set()
    plans.wait(2)
    plans.go.clear()
    plans.worker.submit_goal(plans.job("goal"))
    plans.started.acquire()
    plans.worker.submit_topic(plans.job("third"), preempt=True)
    plans.go.set()
    assert plans.wait(4)[2:] == [("goal", COMPLETED), ("third", COMPLETED)]


def test_a_waiting_goal_is_stopped_at_once(busy):
    job = busy.job("waiting")
    busy.worker.submit_goal(job)
    busy.worker.stop(job, CANCELLED, "")
    assert busy.outcomes == [("waiting", CANCELLED)]


def test_a_running_goal_is_stopped_in_its_work(plans):
    job = plans.job("running")
    plans.worker.submit_goal(job)
    plans.started.acquire()
    plans.worker.stop(job, CANCELLED, "")
    assert plans.wait(1) == [("running", CANCELLED)]


def test_goals_that_waited_too_long_expire_while_another_runs(busy):
    busy.worker.submit_goal(busy.job("impatient", timeout_s=0.01))
    busy.worker.submit_goal(busy.job("patient"))
    time.sleep(0.02)
    busy.worker.expire()
    assert busy.outcomes == [("impatient", TIMEOUT)]


def test_a_running_job_ends_when_its_time_is_over(plans):
    plans.worker.submit_goal(plans.job("slow", timeout_s=0.02))
    assert plans.wait(1) == [("slow", TIMEOUT)]


def test_stop_all_ends_everything_and_waits_for_the_running_job(busy):
    busy.worker.submit_goal(busy.job("goal"))
    busy.worker.submit_topic(busy.job("topic"), preempt=False)
    assert busy.worker.stop_all(PREEMPTED, "", timeout_s=10.0)
    assert sorted(busy.outcomes) == [("busy", PREEMPTED), ("goal", PREEMPTED), ("topic", PREEMPTED)]
