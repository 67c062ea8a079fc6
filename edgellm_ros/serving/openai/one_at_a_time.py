# SPDX-License-Identifier: Apache-2.0
"""OneAtATime: submits requests to a runtime that answers one after another."""

from __future__ import annotations

import dataclasses
import itertools
import math
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Protocol

from edgellm_ros.runtime.request import LLMGenerationRequest, LLMGenerationResponse, Progress


class Answers(Protocol):
    """A runtime, as far as its answers go."""

    def handle_request(self, request: LLMGenerationRequest) -> LLMGenerationResponse: ...


@dataclass(frozen=True)
class TextPiece:
    """A piece of an answer as it is decoded."""

    text: str
    token_ids: tuple[int, ...] = ()  # all of the answer in the last piece, before it none


class QueuedHandle:
    """A request in the queue, or with the runtime."""

    def __init__(self, request: LLMGenerationRequest) -> None:
        self._cancelled = threading.Event()
        self._request = dataclasses.replace(request, on_progress=self._progress, cancel=self._cancelled)
        self._pieces: queue.SimpleQueue[TextPiece | None] = queue.SimpleQueue()
        self._future: Future[LLMGenerationResponse] = Future()
        self._length = 0  # characters that are in pieces

    def __iter__(self) -> Iterator[TextPiece]:
        while (piece := self._pieces.get()) is not None:
            yield piece
        self._pieces.put(None)  # for a further iteration

    def result(self, timeout: float | None = None) -> LLMGenerationResponse:
        """Wait for the answer.

        Raises the error of `handle_request`, CancelledError for a request that was cancelled before its turn,
        or TimeoutError.
        """
        return self._future.result(timeout)

    def cancel(self) -> None:
        """End the request at its next token, or before its turn."""
        self._cancelled.set()
        if self._future.cancel():
            self._pieces.put(None)

    @property
    def done(self) -> bool:
        return self._future.done()

    def answer(self, runtime: Answers) -> None:
        """Answer on this thread, unless the request was cancelled."""
        if not self._future.set_running_or_notify_cancel():
            return
        try:
            response = runtime.handle_request(self._request)
            self._pieces.put(TextPiece(response.text[self._length :], tuple(response.token_ids)))
            self._future.set_result(response)
        except BaseException as error:
            self._future.set_exception(error)
        finally:
            self._pieces.put(None)

    def _progress(self, progress: Progress) -> None:
        new = progress.text[self._length :]
        if new:
            self._length += len(new)
            self._pieces.put(TextPiece(new))


class OneAtATime:
    """A thread that answers requests one after another.

    High priorities come first, then early deadlines. The interface is that of a runtime which decodes several
    requests together (handles.py).
    """

    def __init__(self, runtime: Answers) -> None:
        self._runtime = runtime
        self._waiting: queue.PriorityQueue[tuple[float, float, int, QueuedHandle | None]] = (
            queue.PriorityQueue()
        )
        self._numbers = itertools.count()
        self._open: set[QueuedHandle] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="answers", daemon=True)
        self._thread.start()

    def submit(
        self, request: LLMGenerationRequest, priority: int = 0, deadline: float | None = None
    ) -> QueuedHandle:
        """Put a request in the queue.

        priority: higher ones first. deadline: of `time.monotonic`, earlier ones first; None = the latest.
        CancelledError once this is closed.
        """
        handle = QueuedHandle(request)
        with self._lock:
            if self._closed:
                raise CancelledError
            self._open.add(handle)
        due = math.inf if deadline is None else deadline
        self._waiting.put((-priority, due, next(self._numbers), handle))
        return handle

    def close(self) -> None:
        """Cancel all requests, and wait for the one that is computed."""
        with self._lock:
            self._closed = True
            handles = list(self._open)
        for handle in handles:
            handle.cancel()
        self._waiting.put((-math.inf, -math.inf, next(self._numbers), None))
        self._thread.join()

    def _work(self) -> None:
        while (handle := self._waiting.get()[-1]) is not None:
            handle.answer(self._runtime)
            with self._lock:
                self._open.discard(handle)
