# SPDX-License-Identifier: Apache-2.0
"""Workers as actors of a Ray cluster."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from edgellm_ros.echo import escaped, printable, quoted
from edgellm_ros.evaluation.spreading import Ended
from edgellm_ros.evaluation.task import Outcome, Task, WorkerError, open_task

MISSING = "--ray needs Ray, which is not installed: pip install 'edgellm[ray]'"
CONNECT_S = 10.0
STARTS = 3
AGENT_MS = 120_000  # for Ray's agents, each a process that imports many modules
LAST_PORT = 65535
COLORS = re.compile(r"\x1b\[[0-9;]*m")


class RayCluster:
    """A connection to a Ray cluster, or a Ray instance on this computer.

    Such an instance ends with the context.
    """

    def __init__(self, address: str) -> None:
        """Connect to a cluster.

        address: of its head; "" for the one that RAY_ADDRESS names or that runs on this computer, or else a
        new one. ImportError without Ray, ValueError if no cluster answers, WorkerError if Ray cannot be
        started.
        """
        try:
            import ray
        except ImportError:
            raise ImportError(MISSING) from None
        self._ray = ray
        address = address or os.environ.get("RAY_ADDRESS", "")
        _check_answers(address)
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        handler = signal.getsignal(signal.SIGTERM)  # Ray replaces it
        try:
            ray.init(address=address or "auto", **options)
        except ConnectionError as error:
            if address:
                raise ValueError(
                    f"no Ray cluster at {printable(address)}: {error} (a cluster that asks for tokens needs "
                    "RAY_AUTH_MODE=token)"
                ) from None
            self._start(options)
        signal.signal(signal.SIGTERM, handler)
        self._actors = ray.remote(Actor)

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ray.shutdown()

    def _start(self, options: Mapping[str, Any]) -> None:
        """Start Ray on this computer, in several attempts.

        Ray's limits of time are short for a busy computer.
        """
        os.environ.setdefault("RAY_agent_register_timeout_ms", str(AGENT_MS))
        for attempt in range(STARTS):
            try:
                self._ray.init(address="local", include_dashboard=False, **options)
                return
            except Exception as error:  # Ray raises no class of its own
                self._ray.shutdown()
                if attempt == STARTS - 1:
                    raise WorkerError(f"Ray cannot be started: {_describe(error)}") from None

    def room_for(self, task: Task) -> int:
        """Return the number of workers that the whole cluster has cores and GPUs for.

        ValueError if that is none.
        """
        have = self._ray.cluster_resources()
        room = int(have.get("CPU", 0)) // task.cores
        if task.gpus:
            room = min(room, int(have.get("GPU", 0)) // task.gpus)
        if not room:
            raise ValueError(
                f"the Ray cluster has {have.get('CPU', 0):g} cores and {have.get('GPU', 0):g} GPUs, a worker "
                f"needs {task.cores} and {task.gpus}"
            )
        return room

    def start(self, task: Task) -> RayWorker:
        """Start a worker somewhere in the cluster."""
        options: dict[str, Any] = {"num_cpus": task.cores, "num_gpus": task.gpus, "max_restarts": 0}
        if task.environment:
            options["runtime_env"] = {"env_vars": dict(task.environment)}
        return RayWorker(self._ray, self._actors.options(**options).remote(task))


class RayWorker:
    """An actor."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor

    def open(self) -> None:
        """Wait until the task is open."""
        self._get(self._actor.open.remote())

    def run(self, item: str) -> Outcome:
        """Execute an item."""
        return self._get(self._actor.run.remote(item))

    def end(self) -> None:
        """End the actor, while another thread waits for it too."""
        self._ray.kill(self._actor)

    def _get(self, reference: Any) -> Any:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except self._ray.exceptions.RayError as error:
            self.end()  # one that cannot be reached may still be at work
            raise Ended(_describe(error)) from None


class Actor:
    """Executes items on a computer of the cluster."""

    def __init__(self, task: Task) -> None:
        self._task, self._stack = task, ExitStack()

    def open(self) -> None:
        self._run = open_task(self._task, self._stack)

    def run(self, item: str) -> Outcome:
        """Execute an item."""
        return self._run(item)


def _describe(error: Exception) -> str:
    """Return the first and the last line of Ray's account, which is long and coloured."""
    lines = [line.strip() for line in COLORS.sub("", str(error)).splitlines() if line.strip()]
    return escaped(" ... ".join(dict.fromkeys([*lines[:1], *lines[-1:]]))) or type(error).__name__


def _check_answers(address: str) -> None:
    """Raise ValueError if nothing listens at an address.

    Ray would wait for it many minutes.
    """
    if address in ("", "auto", "local"):
        return
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdecimal() or int(port) > LAST_PORT:
        raise ValueError(f"expected HOST:PORT for --ray, got {quoted(address)}")
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except OSError as error:
        raise ValueError(f"no Ray cluster at {printable(address)}: {error}") from None
