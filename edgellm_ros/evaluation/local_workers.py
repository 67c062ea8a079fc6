# SPDX-License-Identifier: Apache-2.0
"""Workers as processes of this computer."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

from edgellm_ros.evaluation.spreading import Ended
from edgellm_ros.evaluation.task import Outcome, Task, WorkerError, open_task
from edgellm_ros.ros.processes import end_with_parent

STOP_S = 10.0  # for a worker that was asked to end
SIGNALS = {number.value: number.name for number in signal.Signals}


class LocalWorker:
    """A process that ends with this one; Ctrl-C of the terminal reaches this one only.

    The kernel ends the process with the thread that started it.
    """

    def __init__(self, task: Task) -> None:
        # A forked process would have the locks of other threads in the state of that moment.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(task, theirs, os.getpid()), daemon=True)
        with _environment(task.environment):
            self._process.start()
        theirs.close()

    def open(self) -> None:
        """Wait until the task is open."""
        self._receive()

    def run(self, item: str) -> Outcome:
        """Execute an item."""
        with suppress(BrokenPipeError):  # the process has ended, which `_receive` reports
            self._connection.send(item)
        return self._receive()

    def end(self) -> None:
        """End the process, while another thread waits for it too."""
        self._process.terminate()
        self._process.join(STOP_S)
        self._process.kill()
        self._process.join()

    def _receive(self) -> Any:
        try:
            message = self._connection.recv()
        except (EOFError, OSError):  # OSError: it was killed in the middle of a long message
            self._process.join()
            raise Ended(_describe(self._process.exitcode)) from None
        if isinstance(message, Exception):
            raise message
        return message


def work(task: Task, connection: Connection, parent: int) -> None:
    """Execute items in a process of its own until the parent ends the process."""
    os.setsid()
    end_with_parent(parent)
    try:
        with ExitStack() as stack:
            run = open_task(task, stack)
            connection.send(None)
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
