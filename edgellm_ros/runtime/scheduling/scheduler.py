# SPDX-License-Identifier: Apache-2.0
"""Scheduler: the queue of submitted requests, and the thread that answers them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.number_checks import check_number
from edgellm_ros.runtime.answerer import Answerer
from edgellm_ros.runtime.request import LLMGenerationRequest
from edgellm_ros.runtime.scheduling.entry import Clock, Entry
from edgellm_ros.runtime.scheduling.handle import Handle
from edgellm_ros.runtime.scheduling.turn_lock import TurnLock

logger = logging.getLogger(__name__)

MOST_PRIORITY = 1000


class Scheduler:
    """Answers submitted requests on a thread of its own, which the first one starts.

    - lock: of the runtime; held while requests are answered
    - opened: returns what answers, EngineError if the runtime is closed
    """

    def __init__(self, lock: TurnLock, opened: Callable[[], Answerer], clock: Clock = time.monotonic) -> None:
        self._lock = lock
        self._opened = opened
        self._clock = clock
        self._changed = threading.Condition()
        self._queue: list[Entry] = []
        self._count = 0
        self._closing = False
        self._thread: threading.Thread | None = None

    def submit(
        self, request: LLMGenerationRequest, priority: int, deadline: float | None, noise_seed: int
    ) -> Handle:
        """Queue a request; see `LLMInferenceRuntime.submit`."""
        if not isinstance(request, LLMGenerationRequest):
            raise ValueError(f"submit takes an LLMGenerationRequest, got {type(request).__name__}")
        check_number("priority", priority, -MOST_PRIORITY, MOST_PRIORITY)
        if deadline is not None:
            check_number("deadline", deadline, float("-inf"), float("inf"))
        entry = Entry(request, priority=priority, deadline=deadline, clock=self._clock, changed=self._notify)
        entry.sequence = self._opened().prepare_one(entry.request, noise_seed)
        with self._changed:
            if self._closing:
                raise EngineError("the runtime is closed")
            self._count += 1
            entry.number = self._count
            self._queue.append(entry)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="edgellm-scheduler", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return entry.handle

    def close(self) -> None:
        """End the thread and all open requests, which fail; waits for the running step."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        """Answer requests until the runtime is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if self._closing:
                    waiting, self._queue = self._queue, []
                    break
                entry = min(self._queue, key=lambda each: (-each.priority, each.number))
                self._queue.remove(entry)
            if entry.stop.is_late:
                entry.fail(TimeoutError("the deadline passed before the request was begun"))
                continue
            with self._lock:
                try:
                    assert entry.sequence is not None
                    entry.finish(self._opened().answer_one(entry.sequence))
                except Exception as error:
                    entry.fail(error)
        for entry in waiting:
            entry.fail(EngineError("the runtime is closed"))
