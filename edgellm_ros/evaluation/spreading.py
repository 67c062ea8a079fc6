# SPDX-License-Identifier: Apache-2.0
"""Spreads items over workers; items of a worker that ended go to another one."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from edgellm_ros.evaluation.task import Outcome, WorkerError

ATTEMPTS = 3  # workers that may end with the same item, or in a row before they are ready


@dataclass(frozen=True)
class Ready:
    """A worker has opened its task."""

    worker: int


@dataclass(frozen=True)
class Done:
    """A worker has executed the item that it was given."""

    worker: int
    outcome: Outcome


@dataclass(frozen=True)
class Ended:
    """A worker has ended; the item that it was given has no outcome."""

    worker: int
    reason: str


@dataclass(frozen=True)
class Broken:
    """A worker cannot go on, nor could another: the evaluation ends with this error.

    ValueError or WorkerError if the task cannot be opened, WorkerError for a bug.
    """

    worker: int
    error: Exception


Event = Ready | Done | Ended | Broken


class Workers(Protocol):
    """Workers by number, each with one item at most."""

    def start(self, worker: int) -> None:
        """Start a worker, or another one in place of one that ended."""

    def give(self, worker: int, item: str) -> None:
        """Let a worker that is ready, or done with its item, execute an item."""

    def wait(self) -> list[Event]:
        """Return the next events; wait for the first one."""


def spread(items: Iterable[str], workers: Workers, count: int, done: Callable[[str, Outcome], None]) -> None:
    """Execute all items with at most `count` workers; call `done` for each at its end.

    An item fails if ATTEMPTS workers end with it. WorkerError if ATTEMPTS workers in a row end before they
    are ready. The error of a broken worker is raised after `done` for the items that were finished with it.
    """
    waiting = deque(items)
    given: dict[int, str] = {}
    opening: set[int] = set()
    lost: Counter[str] = Counter()
    unopened = 0

    def start(worker: int) -> None:
        opening.add(worker)
        workers.start(worker)

    def give(worker: int) -> None:
        if waiting:
            given[worker] = waiting.popleft()
            workers.give(worker, given[worker])

    for worker in range(min(count, len(waiting))):
        start(worker)
    while waiting or given:
        for event in sorted(workers.wait(), key=lambda event: isinstance(event, Broken)):
            worker = event.worker
            if isinstance(event, Ready):
                opening.remove(worker)
                unopened = 0
                give(worker)
            elif isinstance(event, Done):
                done(given.pop(worker), event.outcome)
                give(worker)
            elif isinstance(event, Broken):
                raise event.error
            else:
                if worker in opening:
                    unopened += 1
                    if unopened == ATTEMPTS:
                        raise WorkerError(
                            f"{ATTEMPTS} workers ended before they were ready, the last one: {event.reason}"
                        )
                elif worker in given:
                    item = given.pop(worker)
                    lost[item] += 1
                    if lost[item] < ATTEMPTS:
                        waiting.appendleft(item)
                    else:
                        reason = f"{ATTEMPTS} workers ended with this item, the last one: {event.reason}"
                        done(item, {"failed": reason})
                if waiting:
                    start(worker)
