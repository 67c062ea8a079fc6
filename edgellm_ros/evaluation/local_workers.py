# SPDX-License-Identifier: Apache-2.0
"""Workers as processes of this computer."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType

from edgellm_ros.evaluation.spreading import Broken, Done, Ended, Event, Ready
from edgellm_ros.evaluation.task import Task, WorkerError, open_task
from edgellm_ros.ros.processes import end_with_parent

READY = "ready"
STOP_S = 10.0  # for a worker that was asked to end
SIGNALS = {number.value: number.name for number in signal.Signals}


@dataclass(frozen=True, eq=False)
class _Worker:
    process: BaseProcess
    connection: Connection


class LocalWorkers:
    """Processes that end with this one; Ctrl-C of the terminal reaches this one only."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._workers: dict[int, _Worker] = {}
        # A forked process would have the locks of other threads in the state of that moment.
        self._context = multiprocessing.get_context("spawn")

    def __enter__(self) -> LocalWorkers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers.values():
            worker.process.terminate()
        for worker in self._workers.values():
            worker.process.join(STOP_S)
            worker.process.kill()
            worker.process.join()
            worker.connection.close()

    def start(self, worker: int) -> None:
        """Start a worker, or another one in place of one that ended."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=work, args=(self._task, theirs, os.getpid()), daemon=True)
        with _environment(self._task.environment):
            process.start()
        theirs.close()
        self._workers[worker] = _Worker(process, ours)

    def give(self, worker: int, item: str) -> None:
        """Let a worker execute an item."""
        with suppress(BrokenPipeError):  # `wait` reports that the worker ended
            self._workers[worker].connection.send(item)

    def wait(self) -> list[Event]:
        """Return the next events; wait for the first one."""
        numbers = {worker.connection: number for number, worker in self._workers.items()}
        return [self._event(numbers[connection]) for connection in wait(numbers)]  # type: ignore[index]

    def _event(self, number: int) -> Event:
        worker = self._workers[number]
        try:
            message = worker.connection.recv()
        except (EOFError, OSError):  # OSError: it was killed in the middle of a long message
            del self._workers[number]
            worker.connection.close()
            worker.process.join()
            return Ended(number, _describe(worker.process.exitcode))
        if isinstance(message, Exception):
            return Broken(number, message)
        return Ready(number) if message == READY else Done(number, message)


def work(task: Task, connection: Connection, parent: int) -> None:
    """Execute items in a process of its own until the parent ends the process."""
    os.setsid()
    end_with_parent(parent)
    try:
        with ExitStack() as stack:
            run = open_task(task, stack)
            connection.send(READY)
            while True:
                connection.send(run(connection.recv()))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass  # the parent has ended, or ends this process
    except (ValueError, WorkerError) as error:
        connection.send(error)


def _describe(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {SIGNALS.get(-code, f'signal {-code}')}"
    return f"exit code {code}"


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
