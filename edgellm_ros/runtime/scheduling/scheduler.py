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
from edgellm_ros.runtime.metrics import RuntimeMetrics
from edgellm_ros.runtime.pipeline import Pipeline
from edgellm_ros.runtime.request import LLMGenerationRequest
from edgellm_ros.runtime.scheduling.encoder_thread import EncoderThread
from edgellm_ros.runtime.scheduling.entry import Clock, Entry
from edgellm_ros.runtime.scheduling.handle import Handle
from edgellm_ros.runtime.scheduling.shares import Share
from edgellm_ros.runtime.scheduling.turn_lock import TurnLock
from edgellm_ros.runtime.scheduling.turns import LOOK_S, Turns

logger = logging.getLogger(__name__)

MOST_PRIORITY = 1000


class Scheduler:
    """Answers submitted requests on a thread of its own, which the first one starts.

    - lock: of the runtime; held while requests are answered
    - opened: returns what answers, EngineError if the runtime is closed
    """

    def __init__(
        self,
        lock: TurnLock,
        opened: Callable[[], Answerer],
        metrics: RuntimeMetrics,
        clock: Clock = time.monotonic,
    ) -> None:
        self._lock = lock
        self._opened = opened
        self._metrics = metrics
        self._clock = clock
        self._changed = threading.Condition()
        self._arrived: list[Entry] = []
        self._count = 0
        self._news = False  # whether a request has arrived, or one was cancelled
        self._closing = False
        self._turns: Turns | None = None
        self._encoder: EncoderThread | None = None
        self._thread: threading.Thread | None = None

    def submit(
        self,
        request: LLMGenerationRequest,
        priority: int,
        deadline: float | None,
        noise_seed: int,
        share: Share,
    ) -> Handle:
        """Queue a request; see `LLMInferenceRuntime.submit`."""
        if not isinstance(request, LLMGenerationRequest):
            raise ValueError(f"submit takes an LLMGenerationRequest, got {type(request).__name__}")
        check_number("priority", priority, -MOST_PRIORITY, MOST_PRIORITY)
        if deadline is not None:
            check_number("deadline", deadline, float("-inf"), float("inf"))
        entry = Entry(
            request,
            share=share,
            priority=priority,
            deadline=deadline,
            clock=self._clock,
            changed=self._notify,
        )
        entry.sequence = self._opened().prepare_one(entry.request, noise_seed)
        with self._changed:
            if self._closing:
                raise EngineError("the runtime is closed")
            self._count += 1
            entry.number = self._count
            self._arrived.append(entry)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="edgellm-scheduler", daemon=True)
                self._thread.start()
            self._tell()
        return entry.handle

    def close(self) -> None:
        """End the thread and all open requests, which fail; waits for the running step."""
        with self._changed:
            self._closing = True
            self._tell()
        if self._thread is not None:
            self._thread.join()

    def _notify(self) -> None:
        with self._changed:
            self._tell()

    def _tell(self) -> None:
        self._news = True
        self._changed.notify_all()

    def _run(self) -> None:
        """Answer requests until the runtime is closed."""
        while self._wait_for_requests():
            with self._lock:
                try:
                    self._answer()
                except Exception as error:  # of the scheduler itself: nothing may wait for ever
                    logger.exception("the scheduler has failed; its requests fail")
                    self._fail_all(error)
                if self._encoder is not None:
                    self._encoder.wait()  # others use the encoders next
        if self._encoder is not None:
            self._encoder.close()
        self._fail_all(EngineError("the runtime is closed"))
        self._turns = None

    def _wait_for_requests(self) -> bool:
        """Wait for requests; return False once the runtime is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._arrived or self._has_waiting or self._closing)
            return not self._closing

    @property
    def _has_waiting(self) -> bool:
        return self._turns is not None and bool(self._turns.waiting)

    def _answer(self) -> None:
        """Take turns until no request is left.

        If others want the runtime's lock, no request begins, and those that run are answered.
        """
        if self._turns is None:
            self._turns = self._make_turns()
        turns = self._turns
        turns.begin()
        while not self._closing:
            with self._changed:
                arrived, self._arrived = self._arrived, []
                self._news = False
            turns.waiting += arrived
            turns.turn(admits=not self._lock.is_wanted)
            if turns.is_idle and (self._lock.is_wanted or not (turns.waiting or self._arrived)):
                return
            if turns.is_waiting:
                with self._changed:
                    self._changed.wait_for(lambda: self._news or self._closing, LOOK_S)
        self._fail_all(EngineError("the runtime is closed"))  # while no other thread uses the batch

    def _make_turns(self) -> Turns:
        answerer = self._opened()
        if isinstance(answerer, Pipeline) and answerer.device.runs_beside:
            self._encoder = EncoderThread(answerer.encoders, self._notify)
        return Turns(answerer, self._metrics, self._clock, lambda: self._news, self._encoder)

    def _fail_all(self, error: Exception) -> None:
        with self._changed:
            arrived, self._arrived = self._arrived, []
        for entry in arrived:
            entry.fail(error)
        if self._turns is not None:
            try:
                self._turns.fail_all(error)
            except Exception:  # of the device: its requests have failed
                logger.exception("the batch could not be cleared")
