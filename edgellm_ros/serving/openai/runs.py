# SPDX-License-Identifier: Apache-2.0
"""Runs: the requests of one client on their way through the runtime, for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Executor
from contextlib import suppress

from edgellm_ros.runtime.request import LLMGenerationRequest, LLMGenerationResponse
from edgellm_ros.serving.openai.handles import Handle, Submit
from edgellm_ros.serving.openai.limits import MAX_CHOICES

Item = str | LLMGenerationResponse


class StoppedError(Exception):
    """The runtime ended a request before its answer was complete."""


class Runs:
    """Submits requests, and follows each on a thread of `threads`.

    At most MAX_CHOICES of them are submitted at a time.
    """

    def __init__(self, submit: Submit, requests: Sequence[LLMGenerationRequest], threads: Executor) -> None:
        self._submit = submit
        self._requests = requests
        self._threads = threads
        self._handles: list[Handle] = []
        self._queue: asyncio.Queue[tuple[int, Item | BaseException]] = asyncio.Queue()

    async def items(self) -> AsyncGenerator[tuple[int, Item], None]:
        """Yield pieces of text, and at its end the response, of each request by its index.

        Raises the first error of a request, StoppedError if the runtime cancels one. All requests end with
        this iterator.
        """
        try:
            for index in range(min(MAX_CHOICES, len(self._requests))):
                self._start(index)
            left = len(self._requests)
            while left:
                index, item = await self._queue.get()
                if isinstance(item, BaseException):
                    raise item
                yield index, item
                if isinstance(item, LLMGenerationResponse):
                    left -= 1
                    if len(self._handles) < len(self._requests):
                        self._start(len(self._handles))
        finally:
            self.cancel()

    async def responses(self) -> list[LLMGenerationResponse]:
        """Return all responses, in the order of the requests."""
        found: dict[int, LLMGenerationResponse] = {}
        async for index, item in self.items():
            if isinstance(item, LLMGenerationResponse):
                found[index] = item
        return [found[index] for index in range(len(self._requests))]

    def cancel(self) -> None:
        """End all requests."""
        for handle in self._handles:
            handle.cancel()

    def _start(self, index: int) -> None:
        handle = self._submit(self._requests[index])
        self._handles.append(handle)
        self._threads.submit(self._follow, index, handle, asyncio.get_running_loop())

    def _follow(self, index: int, handle: Handle, loop: asyncio.AbstractEventLoop) -> None:
        """Pass on the pieces and the response of one request, on a thread."""
        item: Item | BaseException
        with suppress(RuntimeError):  # the loop was closed: the server has stopped
            try:
                for piece in handle:
                    if piece.text:
                        loop.call_soon_threadsafe(self._queue.put_nowait, (index, piece.text))
                item = handle.result()
                if item.finish_reason == "cancelled":
                    item = StoppedError()
            except BaseException as error:
                item = error
            loop.call_soon_threadsafe(self._queue.put_nowait, (index, item))
