# SPDX-License-Identifier: Apache-2.0
"""Spreading over workers that end at the worst moments.

The workers are doubles in this process.
"""

from __future__ import annotations

import pytest

from edgellm_ros.evaluation.spreading import Broken, Done, Ended, Ready, spread
from edgellm_ros.evaluation.task import WorkerError


class ScriptedWorkers:
    """Workers that end when they are given an item for which a script says so."""

    def __init__(self, ends: dict[str, int] | None = None, opens: bool = True) -> None:
        self.ends = dict(ends or {})  # by item: how many workers end with it
        self.opens = opens
        self.started: list[int] = []
        self.given: list[str] = []
        self.events: list = []

    def start(self, worker):
        self.started.append(worker)
        self.events.append(Ready(worker) if self.opens else Ended(worker, "out of memory"))

    def give(self, worker, item):
        self.given.append(item)
        if self.ends.get(item):
            self.ends[item] -= 1
            self.events.append(Ended(worker, "killed"))
        else:
            self.events.append(Done(worker, {"result": item}))

    def wait(self):
        assert self.events, "nothing to wait for"
        return [self.events.pop(0)]


def run(workers: ScriptedWorkers, items: str, count: int) -> list[tuple[str, dict]]:
    done = []
    spread(items, workers, count, lambda item, outcome: done.append((item, outcome)))
    return done


@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_every_item_is_done_once(count):
    workers = ScriptedWorkers()
    assert sorted(run(workers, "abcde", count)) == [(item, {"result": item}) for item in "abcde"]
    assert workers.started == list(range(min(count, 5)))


def test_an_item_of_a_worker_that_ended_is_done_by_another():
    workers = ScriptedWorkers({"b": 1, "e": 2})
    assert sorted(run(workers, "abcde", 2)) == [(item, {"result": item}) for item in "abcde"]
    assert sorted(workers.given) == list("abbcdeee")


def test_an_item_with_which_three_workers_end_fails_and_the_others_are_done():
    workers = ScriptedWorkers({"b": 9})
    done = dict(run(workers, "abc", 2))
    assert workers.given.count("b") == 3
    assert done["b"] == {"failed": "3 workers ended with this item, the last one: killed"}
    assert (done["a"], done["c"]) == ({"result": "a"}, {"result": "c"})


def test_workers_that_never_become_ready_are_an_error():
    workers = ScriptedWorkers(opens=False)
    with pytest.raises(WorkerError, match="3 workers ended before they were ready, the last one: out of mem"):
        run(workers, "abc", 2)


@pytest.mark.parametrize("error", [ValueError("another engine"), WorkerError("a bug")])
def test_an_item_that_is_done_together_with_an_error_is_recorded_before_the_error_is_raised(error):
    workers = ScriptedWorkers()
    workers.wait = lambda: (
        [workers.events.pop(0)] if len(workers.given) < 2 else [Broken(0, error), Done(1, {"result": "b"})]
    )
    done = []
    with pytest.raises(type(error), match=str(error)):
        spread("ab", workers, 2, lambda item, outcome: done.append((item, outcome)))
    assert done == [("b", {"result": "b"})]


def test_without_items_no_worker_is_started():
    workers = ScriptedWorkers()
    assert run(workers, "", 2) == []
    assert workers.started == []
