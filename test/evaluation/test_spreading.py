# SPDX-License-Identifier: Apache-2.0
"""Spreading over workers that end at the worst moments.

The workers are doubles in this process.
"""

from __future__ import annotations

import concurrent.futures
import threading

import pytest

from edgellm_ros.evaluation import spreading
from edgellm_ros.evaluation.spreading import Ended, spread
from edgellm_ros.evaluation.task import WorkerError


class Crew:
    """Starts workers that end when they execute an item for which a script says so."""

    def __init__(self, ends: dict[str, int] | None = None, opens: bool = True) -> None:
        self.ends = dict(ends or {})  # by item: how many workers end with it
        self.opens = opens
        self.started: list[ScriptedWorker] = []
        self.given: list[str] = []

    def start(self) -> ScriptedWorker:
        self.started.append(ScriptedWorker(self))
        return self.started[-1]


class ScriptedWorker:
    def __init__(self, crew: Crew) -> None:
        self.crew = crew
        self.was_ended = threading.Event()

    def open(self):
        if not self.crew.opens:
            raise Ended("out of memory")

    def run(self, item):
        self.crew.given.append(item)
        if self.crew.ends.get(item):
            self.crew.ends[item] -= 1
            raise Ended("killed")
        return {"result": item}

    def end(self):
        self.was_ended.set()


def run(crew: Crew, items: str, count: int) -> list[tuple[str, dict]]:
    done = []
    spread(items, crew.start, count, lambda item, outcome: done.append((item, outcome)))
    return done


@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_every_item_is_done_once(count):
    crew = Crew()
    assert sorted(run(crew, "abcde", count)) == [(item, {"result": item}) for item in "abcde"]
    assert len(crew.started) == min(count, 5)


def test_an_item_of_a_worker_that_ended_is_done_by_another():
    crew = Crew({"b": 1, "e": 2})
    assert sorted(run(crew, "abcde", 2)) == [(item, {"result": item}) for item in "abcde"]
    assert sorted(crew.given) == list("abbcdeee")


def test_an_item_with_which_three_workers_end_fails_and_the_others_are_done():
    crew = Crew({"b": 9})
    done = dict(run(crew, "abc", 2))
    assert crew.given.count("b") == 3
    assert done["b"] == {"failed": "3 workers ended with this item, the last one: killed"}
    assert (done["a"], done["c"]) == ({"result": "a"}, {"result": "c"})


def test_workers_that_never_become_ready_are_an_error():
    crew = Crew(opens=False)
    with pytest.raises(WorkerError, match="3 workers ended before they were ready, the last one: out of mem"):
        run(crew, "abc", 2)


@pytest.mark.parametrize("error", [ValueError("another engine"), WorkerError("a bug")])
def test_an_item_done_together_with_an_error_is_recorded_before_it_is_raised(error, monkeypatch):
    crew = Crew()

    def run_item(self, item):
        if item == "a":
            raise error
        return {"result": item}

    def wait_for_all(calls, return_when):
        return concurrent.futures.wait(calls)

    monkeypatch.setattr(ScriptedWorker, "run", run_item)
    monkeypatch.setattr(spreading, "wait", wait_for_all)
    done = []
    with pytest.raises(type(error), match=str(error)):
        spread("ab", crew.start, 2, lambda item, outcome: done.append((item, outcome)))
    assert done == [("b", {"result": "b"})]


def test_an_interruption_ends_workers_that_are_at_work(monkeypatch):
    def run_until_ended(self, item):
        if item == "a":
            return {"result": item}
        self.was_ended.wait(10)
        raise Ended("terminated")

    def interrupt(item, outcome):
        raise KeyboardInterrupt

    crew = Crew()
    monkeypatch.setattr(ScriptedWorker, "run", run_until_ended)
    with pytest.raises(KeyboardInterrupt):
        spread("bac", crew.start, 3, interrupt)
    assert all(worker.was_ended.is_set() for worker in crew.started)


def test_only_the_calling_thread_starts_workers_and_takes_outcomes():
    crew, threads = Crew({"b": 1}), set()

    def start():
        threads.add(threading.current_thread())
        return crew.start()

    spread("abc", start, 2, lambda item, outcome: threads.add(threading.current_thread()))
    assert threads == {threading.current_thread()}


def test_without_items_no_worker_is_started():
    crew = Crew()
    assert run(crew, "", 2) == []
    assert crew.started == []
