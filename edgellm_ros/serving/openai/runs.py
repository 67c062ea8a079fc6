# SPDX-License-Identifier: Apache-2.0
"""Runs: the requests of one client on their way through the runtime, for asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from itertools import islice

from edgellm_ros.runtime.request import LLMGenerationRequest, LLMGenerationResponse
from edgellm_ros.runtime.scheduling.handle import Handle, TextPiece
from edgellm_ros.serving.openai.limits import MAX_CHOICES

Item = TextPiece | LLMGenerationResponse
Submit = Callable[[LLMGenerationRequest], Handle]  # `LLMInferenceRuntime.submit`


class StoppedError(Exception):
    """The runtime ended a request before its answer was complete."""


class Runs:
    """Submits requests, and follows each on a thread of `threads`.

    At most MAX_CHOICES of them are under way at a time. A request is submitted on its thread too, because
    that may make its prompt.
    """

    def __init__(self, submit: Submit, requests: Sequence[LLMGenerationRequest], threads: Executor) -> None:
        self._submit = submit
        self._requests = requests
        self._threads = threads
        self._lock = threading.Lock()
        self._handles: list[Handle] = []
        self._is_cancelled = False
        self._queue: asyncio.Queue[tuple[int, Item | BaseException]] = asyncio.Queue()

    async def items(self) -> AsyncGenerator[tuple[int, Item], None]:
        """Yield pieces of each answer and its response, by the index of the request.

        Raises the first error of a request, StoppedError if the runtime cancels one. All requests end with
        this iterator.
        """
        waiting = iter(range(len(self._requests)))
        try:
            for index in islice(waiting, MAX_CHOICES):
                self._start(index)
            left = len(self._requests)
            while left:
                index, item = await self._queue.get()
                if isinstance(item, BaseException):
                    raise item
                yield index, item
                if isinstance(item, LLMGenerationResponse):
                    left -= 1
                    for following in islice(waiting, 1):
                        self._start(following)
        finally:
            self.cancel()

    def cancel(self) -> None:
        """End all requests."""
        with self._lock:
            self._is_cancelled = True
            handles = list(self._handles)
        for handle in handles:
            handle.cancel()

    def _start(self, index: int) -> None:
        self._threads.submit(self._follow, index, asyncio.get_running_loop())

    def _follow(self, index: int, loop: asyncio.AbstractEventLoop) -> None:
        """Pass on the pieces and the response of one request."""
        item: Item | BaseException
        with suppress(RuntimeError):  # the loop was closed: the server has stopped
            try:
                handle = self._submit(self._requests[index])
                with self._lock:
                    self._handles.append(handle)
                    is_cancelled = self._is_cancelled
                if is_cancelled:
                    handle.cancel()
                for piece in handle:
                    loop.call_soon_threadsafe(self._queue.put_nowait, (index, piece))
                item = handle.result()
                if item.finish_reason == "cancelled":
                    item = StoppedError()
            except BaseException as error:
                item = error
            loop.call_soon_threadsafe(self._queue.put_nowait, (index, item))
