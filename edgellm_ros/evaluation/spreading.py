# SPDX-License-Identifier: Apache-2.0
"""Spreads items over workers; items of a worker that ended go to another one."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

from edgellm_ros.evaluation.task import Outcome, WorkerError

ATTEMPTS = 3  # workers that may end with the same item, or in a row before their task is open


class Ended(Exception):
    """Error for a worker that has ended, with the reason; its item has no outcome."""


class Worker(Protocol):
    """A process that was started to execute items, one at a time.

    `open` and `run` wait for the process, and raise Ended if it ends. Their other errors end the evaluation,
    because another worker could not go on either: ValueError if the task cannot be opened, WorkerError for a
    bug.
    """

    def open(self) -> None:
        """Wait until the task is open."""

    def run(self, item: str) -> Outcome:
        """Execute an item."""

    def end(self) -> None:
        """End the process, while another thread waits for it too."""


def spread(
    items: Iterable[str], start: Callable[[], Worker], count: int, done: Callable[[str, Outcome], None]
) -> None:
    """Execute all items with at most `count` workers; call `done` for each at its end.

    Threads wait for workers; `start`, which starts one, and `done` are called by this thread. An item fails
    if ATTEMPTS workers end with it. WorkerError if ATTEMPTS workers in a row end before their task is open.
    An error of a worker is raised after `done` for the items that were finished with it.
    """
    waiting = deque(items)
    workers: set[Worker] = set()
    calls: dict[Future[Any], tuple[Worker, str | None]] = {}  # None: the worker opens its task
    ended: Counter[str | None] = Counter()  # workers by what they were doing

    def begin() -> None:
        worker = start()
        workers.add(worker)
        calls[threads.submit(worker.open)] = worker, None

    def settle(call: Future[Any]) -> None:
        """Take the result of a call, and give its worker the next item."""
        worker, item = calls.pop(call)
        try:
            outcome = call.result()
        except Ended as reason:
            workers.remove(worker)
            ended[item] += 1
            if ended[item] < ATTEMPTS:
                waiting.extendleft(() if item is None else (item,))
            elif item is None:
                text = f"{ATTEMPTS} workers ended before they were ready, the last one: {reason}"
                raise WorkerError(text) from None
            else:
                done(item, {"failed": f"{ATTEMPTS} workers ended with this item, the last one: {reason}"})
            if waiting:
                begin()
            return
        if item is None:
            ended[None] = 0
        else:
            done(item, outcome)
        if waiting:
            item = waiting.popleft()
            calls[threads.submit(worker.run, item)] = worker, item

    with ThreadPoolExecutor(2 * count) as threads:  # for each worker one that waits, and one that ends it
        try:
            for _ in range(min(count, len(waiting))):
                begin()
            while waiting or any(item for _, item in calls.values()):
                finished, _ = wait(calls, return_when=FIRST_COMPLETED)
                for call in sorted(finished, key=lambda call: call.exception() is not None):
                    settle(call)
        finally:
            for worker in workers:
                threads.submit(worker.end)
