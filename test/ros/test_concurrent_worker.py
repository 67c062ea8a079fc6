# SPDX-License-Identifier: Apache-2.0
"""Several plans at once: the planning threads, texts of answers, priorities."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from std_msgs.msg import Header

from edgellm_ros.ros.node.engine_checks import plans_at_once
from edgellm_ros.ros.node.metrics import NodeMetrics
from edgellm_ros.ros.node.outputs.answer_stream import AnswerStream
from edgellm_ros.ros.node.planning.plan_inputs import ObservedInputs
from edgellm_ros.ros.node.planning.plan_request import PlanRequest
from edgellm_ros.ros.node.planning.planner import Planner
from edgellm_ros.ros.node.settings.priorities import parse_priorities
from edgellm_ros.ros.node.worker import worker
from edgellm_ros.ros.node.worker.job import (
    CANCELLED,
    COMPLETED,
    DRIVING,
    ERROR,
    GOALS,
    PREEMPTED,
    TIMEOUT,
    Job,
    Outcome,
)
from edgellm_ros.ros.node.worker.worker import PlanWorker
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams

WAIT_S = 20.0


class Plans:
    """Plans that last until they are released by name, or stopped."""

    def __init__(self, most: int = 4) -> None:
        self.outcomes: dict[str, str] = {}
        self.running: set[str] = set()
        self.released: set[str] = set()
        self.worker = PlanWorker(self._plan, 4, most=most)

    def _plan(self, job: Job) -> Outcome:
        self.running.add(job.request)
        while job.request not in self.released:
            job.check_time()
            if job.cancel.wait(0.002):
                return job.stopped
        return Outcome(COMPLETED)

    def job(self, name: str, timeout_s: float = 30.0) -> Job:
        def done(outcome: Outcome) -> None:
            self.running.discard(name)
            self.outcomes[name] = outcome.reason

        return Job(name, timeout_s, done, client=name)

    def goals(self, names: str) -> list[Job]:
        """Start goals of several clients."""
        jobs = [self.job(name) for name in names]
        for job in jobs:
            self.worker.submit_goal(job)
        self.wait(lambda: self.running >= set(names))
        return jobs

    def wait(self, condition) -> None:
        end = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end, (self.running, self.outcomes)
            time.sleep(0.002)


@pytest.fixture
def plans() -> Iterator[Plans]:
    plans = Plans()
    yield plans
    plans.worker.close()


def test_driving_starts_while_all_places_are_taken(plans):
    plans.goals("abcd")
    plans.worker.submit_topic(plans.job("drive"), preempt=True)
    plans.wait(lambda: "drive" in plans.running)
    assert (plans.worker.running(DRIVING), plans.worker.running(GOALS)) == (1, 4)
    plans.released.add("drive")
    plans.wait(lambda: plans.outcomes == {"drive": COMPLETED})


def test_a_newer_command_preempts_driving_and_no_goal(plans):
    plans.goals("ab")
    plans.worker.submit_topic(plans.job("old"), preempt=True)
    plans.wait(lambda: "old" in plans.running)
    plans.worker.submit_topic(plans.job("new"), preempt=True)
    plans.wait(lambda: plans.running == {"a", "b", "new"})
    assert plans.outcomes == {"old": PREEMPTED}


def test_cancellation_of_one_goal_leaves_the_others(plans):
    jobs = plans.goals("abc")
    plans.worker.stop(jobs[1], CANCELLED, "")
    plans.wait(lambda: plans.outcomes == {"b": CANCELLED})
    assert plans.running == {"a", "c"}
    plans.released |= {"a", "c"}
    plans.wait(lambda: plans.outcomes == {"a": COMPLETED, "b": CANCELLED, "c": COMPLETED})


def test_the_time_of_one_goal_ends_this_goal(plans):
    plans.goals("ab")
    plans.worker.submit_goal(plans.job("late", timeout_s=0.02))
    plans.wait(lambda: plans.outcomes == {"late": TIMEOUT})
    assert plans.running == {"a", "b"}


def test_stop_all_ends_all_plans_that_run_or_wait(plans):
    plans.goals("abcd")
    plans.worker.submit_topic(plans.job("drive"), preempt=True)
    plans.wait(lambda: "drive" in plans.running)
    plans.worker.submit_goal(plans.job("waiting"))
    assert plans.worker.stop_all(PREEMPTED, "", timeout_s=WAIT_S)
    assert plans.outcomes == dict.fromkeys(["a", "b", "c", "d", "drive", "waiting"], PREEMPTED)
    assert plans.worker.pending == 0


def test_close_ends_all_threads():
    before = set(threading.enumerate())
    plans = Plans()
    plans.goals("ab")
    own = set(threading.enumerate()) - before
    assert len(own) == 5
    plans.worker.close()
    assert not any(thread.is_alive() for thread in own)
    assert plans.outcomes == {"a": PREEMPTED, "b": PREEMPTED}


def test_work_that_changes_the_runtime_runs_alone_and_goals_after_it_wait(plans):
    plans.goals("ab")
    change = plans.job("change")
    change.runs_alone, change.is_plan = True, False
    plans.worker.submit_goal(change)
    plans.worker.submit_goal(plans.job("after"))
    plans.released.add("a")
    plans.wait(lambda: "a" in plans.outcomes)
    assert plans.running == {"b"}
    plans.released.add("b")
    plans.wait(lambda: "change" in plans.running)
    assert plans.running == {"change"}
    plans.released.add("change")
    plans.wait(lambda: "after" in plans.running)


def test_a_waiting_change_that_is_stopped_lets_the_goals_after_it_start(plans, monkeypatch):
    monkeypatch.setattr(worker, "LOOK_S", 2 * WAIT_S)
    plans.goals("a")
    change = plans.job("change")
    change.runs_alone = True
    plans.worker.submit_goal(change)
    plans.worker.submit_goal(plans.job("after"))
    time.sleep(0.1)  # the idle threads have looked, and wait
    plans.worker.stop(change, CANCELLED, "")
    plans.wait(lambda: plans.running == {"a", "after"})


def test_a_thousand_jobs_of_many_threads_end_once_each():
    ended: list[int] = []
    planning = PlanWorker(lambda job: Outcome(COMPLETED), 10_000, most=4)

    def send(first: int) -> None:
        for number in range(first, first + 250):
            job = Job(number, 30.0, lambda outcome, number=number: ended.append(number), client=str(first))
            if number % 5:
                planning.submit_goal(job)
            else:
                planning.submit_topic(job, preempt=number % 2 == 0)

    threads = [threading.Thread(target=send, args=(first,)) for first in range(0, 1000, 250)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    end = time.monotonic() + WAIT_S
    while planning.pending and time.monotonic() < end:
        time.sleep(0.002)
    planning.close()
    assert sorted(ended) == list(range(1000))


@pytest.fixture(scope="module")
def runtime(arena_engine) -> Iterator[LLMInferenceRuntime]:
    with LLMInferenceRuntime(arena_engine, drafting="off") as runtime:
        yield runtime


def planned(runtime: LLMInferenceRuntime, *requests: PlanRequest) -> list[Outcome]:
    """Plan requests side by side."""
    seen = ObservedInputs((), None, Header(), None, {})
    node = SimpleNamespace(get_logger=lambda: SimpleNamespace(error=print))
    chunking = SimpleNamespace(condition=lambda motion: None)
    parameters = SimpleNamespace(current=SimpleNamespace(frame_id="base"))
    inputs = SimpleNamespace(observe=lambda request, drives: seen)
    planning = PlanWorker(Planner(node, parameters, runtime, inputs, chunking).plan, 10, most=4)
    outcomes: dict[int, Outcome] = {}
    for index, request in enumerate(requests):
        done = lambda outcome, index=index: outcomes.__setitem__(index, outcome)  # noqa: E731
        planning.submit_goal(Job(request, 60.0, done, client=str(index)))
    end = time.monotonic() + WAIT_S
    while planning.pending and time.monotonic() < end:
        time.sleep(0.002)
    planning.close()
    return [outcomes[index] for index in range(len(requests))]


def asked(prompt: str, **changes: object) -> PlanRequest:
    fields = {
        "request_id": prompt, "prompt": prompt, "system_prompt": "", "frames": (), "sound": None, "lora": "",
        "sampling": lambda: SamplingParams(max_tokens=24), "noise_seed": 1, "action_samples": 2,
        "denoise_steps": None,
    }  # fmt: skip
    return PlanRequest(**{**fields, **changes})


def test_plans_side_by_side_have_the_results_of_plans_alone(runtime):
    prompts = ["go to the red box", "what do you see?", "stop", "turn around"]
    found = planned(runtime, *map(asked, prompts))
    for prompt, outcome in zip(prompts, found, strict=True):
        request = LLMGenerationRequest(
            prompt, action_samples=2, noise_seed=1, sampling=SamplingParams(max_tokens=24)
        )
        expected = runtime.handle_request(request)
        assert outcome.reason == COMPLETED
        assert list(outcome.result.generation.token_ids) == expected.token_ids
        if expected.actions is not None:
            chunks = [np.array(chunk.values, np.float32) for chunk in outcome.result.action_chunks]
            np.testing.assert_array_equal(chunks, expected.actions.reshape(2, -1))


def test_an_error_ends_its_own_plan_alone(runtime):
    def broken() -> SamplingParams:
        raise RuntimeError("no such thing")

    unknown, internal = asked("stop", lora="none"), asked("stop", sampling=broken)
    found = planned(runtime, asked("stop"), unknown, internal, asked("stop"))
    assert [outcome.reason for outcome in found] == [COMPLETED, ERROR, ERROR, COMPLETED]
    assert "unknown LoRA adapter 'none'" in found[1].message
    assert "RuntimeError: no such thing" in found[2].message


def test_a_plan_is_submitted_with_its_level_and_deadline_and_ends_at_it():
    asked_for, raised = {}, []

    def submit(request, priority, deadline):
        asked_for.update(priority=priority, deadline=deadline)

        def result():
            job.raise_level(9)
            time.sleep(max(0.0, deadline - time.monotonic()))
            raise TimeoutError("late")

        return SimpleNamespace(result=result, raise_priority=raised.append)

    runtime = SimpleNamespace(submit=submit, active_lora="", parts=SimpleNamespace(missing=lambda part: "no"))
    seen = ObservedInputs((), None, Header(), None, {})
    inputs = SimpleNamespace(observe=lambda request, drives: seen)
    runtime.config = SimpleNamespace(action=None)
    node = SimpleNamespace(get_logger=lambda: SimpleNamespace(error=print))
    job = Job(asked("stop"), 0.05, lambda outcome: None, level=7)
    assert Planner(node, None, runtime, inputs, None).plan(job) == Outcome(TIMEOUT, "no result within 0.05 s")
    assert asked_for == {"priority": 7, "deadline": job.deadline}
    assert raised == [7, 9]


def test_texts_of_answers_side_by_side_leave_one_after_another():
    left: list[str] = []
    stream, (a, b, c, d) = AnswerStream(left.append), (object() for _ in range(4))
    for answer, piece in ((a, "a1 "), (b, "b1 "), (c, "c1 "), (a, "a2 "), (b, "b2 ")):
        stream.add(answer, piece)
    assert left == ["a1 ", "a2 "]
    stream.end(b)
    stream.end(d)  # had no pieces
    assert left == ["a1 ", "a2 "]
    stream.end(a)
    assert left == ["a1 ", "a2 ", "b1 b2 ", "c1 "]
    stream.add(c, "c2 ")
    stream.end(c)
    stream.add(d, "d1")
    assert "".join(left) == "a1 a2 b1 b2 c1 c2 d1"


def test_waiting_times_are_those_of_each_class():
    metrics = NodeMetrics()
    latencies = {f"{name}_latency": 0.0 for name in ("vision", "audio", "prefill", "first_token", "decode")}
    for kind, waited in ((DRIVING, 0.1), (GOALS, 2.0), (GOALS, 4.0), (GOALS, 9.0)):
        generation = SimpleNamespace(queue_latency=waited, action_latency=0.0, total_latency=1.0, **latencies)
        metrics.plan_done(Outcome(COMPLETED, result=SimpleNamespace(generation=generation)), kind)
    values = metrics.values()
    assert (values["driving_wait_median"], values["driving_wait_max"]) == (0.1, 0.1)
    assert (values["goals_wait_median"], values["goals_wait_max"]) == (4.0, 9.0)


@pytest.mark.parametrize(
    ("wanted", "policy", "max_batch_size", "expected"),
    [(0, None, 8, 4), (0, None, 2, 2), (0, "act", 8, 1), (6, None, 2, 6), (1, None, 8, 1), (3, "act", 1, 3)],
)
def test_plans_at_once_follow_from_the_engine_unless_they_are_given(wanted, policy, max_batch_size, expected):
    assert plans_at_once(wanted, SimpleNamespace(policy=policy), max_batch_size) == expected


def test_priorities_of_clients():
    assert parse_priorities(["", "/agent=3", "/a=b=-10"]) == {"/agent": 3, "/a=b": -10}
    for value in ("/agent", "=1", "/agent=", "/agent=11", "/agent=1.5"):
        with pytest.raises(ValueError, match=f"NAME=PRIORITY.* from -10 to 10, got '{value}'"):
            parse_priorities([value])
    with pytest.raises(ValueError, match="client_priorities names '/a' twice"):
        parse_priorities(["/a=1", "/a=1"])
