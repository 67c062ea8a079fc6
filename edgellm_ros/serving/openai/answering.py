# SPDX-License-Identifier: Apache-2.0
r"""Answering: from a body to a response, whole or as a stream.

  slot, body -> JSON -> requests -> submit -> pieces -> events, or one answer
                                         \-> a client that leaves ends its own requests

Bodies are converted, and requests followed, on threads: the event loop only passes on what is ready.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from edgellm_ros.echo import printable
from edgellm_ros.engine.errors import DeviceLostError, EngineError
from edgellm_ros.runtime.request import LLMGenerationResponse
from edgellm_ros.serving.openai.access import parse_body, read_body
from edgellm_ros.serving.openai.errors import ApiError, bad_request
from edgellm_ros.serving.openai.limits import MAX_CHOICES, Limits
from edgellm_ros.serving.openai.metrics import AnswerClock, Metrics
from edgellm_ros.serving.openai.runs import Item, Runs, StoppedError, Submit
from edgellm_ros.serving.openai.slots import Slots
from edgellm_ros.serving.openai.streams import DONE, EventStream, event, unless_client_leaves
from edgellm_ros.serving.openai.wire.answers import Answers
from edgellm_ros.serving.openai.wire.asked import Asked
from edgellm_ros.strict_json import strict_json

logger = logging.getLogger(__name__)
STOPS = "the server stops"
READERS = 2  # threads that convert bodies
# Fields at the beginning of the runtime's errors.
RUNTIME_FIELDS = {
    "messages": "messages",
    "json_schema": "response_format",
    "regex": "regex",
    "choices": "choices",
}

T = TypeVar("T")
Items = AsyncGenerator[tuple[int, Item], None]
Whole = Callable[[list[LLMGenerationResponse]], dict[str, Any]]


class Answering:
    """Answers requests through a runtime, a limited number at a time."""

    def __init__(self, submit: Submit, limits: Limits) -> None:
        self._submit = submit
        self._limits = limits
        self._slots = Slots(limits.max_requests)
        self._readers = ThreadPoolExecutor(READERS, "readers")
        self._followers = ThreadPoolExecutor(limits.max_requests * MAX_CHOICES, "followers")
        self._runs: set[Runs] = set()
        self.metrics = Metrics(lambda: self._slots.taken)
        self.device_is_lost = False

    def cancel(self) -> None:
        """End all requests, from any thread."""
        for runs in list(self._runs):
            runs.cancel()

    def close(self) -> None:
        """End all requests and the threads."""
        self.cancel()
        self._readers.shutdown()
        self._followers.shutdown()

    async def answer(self, request: Request, read: Callable[[Any], Answers], field: str) -> Response:
        """Answer a request whose JSON `read` converts.

        field: of the prompt, which errors of the runtime are about. ApiError, ClientLeftError.
        """

        def convert(content: Any) -> tuple[Asked, Whole, Answers]:
            answers = read(content)
            return answers.asked, answers.whole, answers

        return await self._answer(request, convert, field)

    async def answer_whole(
        self, request: Request, read: Callable[[Any], tuple[Asked, Whole]], field: str
    ) -> Response:
        """Answer a request that is never streamed."""
        return await self._answer(request, lambda content: (*read(content), None), field)

    async def _answer(
        self, request: Request, read: Callable[[Any], tuple[Asked, Whole, Answers | None]], field: str
    ) -> Response:
        self._slots.take()
        is_streamed = False
        clock = self.metrics.clock()
        try:
            body = await read_body(request, self._limits)
            reading = self._in_thread(lambda: read(parse_body(body)))
            asked, whole, answers = await unless_client_leaves(reading, request.receive)
            items = self._items(asked, field, clock)
            if not asked.stream or answers is None:
                responses = await unless_client_leaves(_responses(items), request.receive)
                return json_response(whole(responses))
            # A request that the runtime refuses has an error in place of a stream.
            first = await unless_client_leaves(anext(items), request.receive)
            is_streamed = True
            return EventStream(self._events(answers, first, items), self._end_of_stream)
        finally:
            if not is_streamed:
                self._slots.give_back()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._readers, work)

    async def _items(self, asked: Asked, field: str, clock: AnswerClock) -> Items:
        """Yield the pieces and responses of the requests; measure them. ApiError."""
        runs = Runs(self._submit, asked.requests, self._followers)
        self._runs.add(runs)
        try:
            async with aclosing(runs.items()) as items:
                async for index, item in items:
                    if isinstance(item, LLMGenerationResponse):
                        clock.end(index, item)
                    elif item.text:
                        clock.text(index)
                    yield index, item
        except Exception as error:
            raise self.failure(error, field) from error
        finally:
            self._runs.discard(runs)

    async def _events(
        self, answers: Answers, first: tuple[int, Item], items: Items
    ) -> AsyncGenerator[bytes, None]:
        responses: dict[int, LLMGenerationResponse] = {}
        count = len(answers.asked.requests)
        async with aclosing(items):
            try:
                for each in answers.begin():
                    yield event(each)
                index, item = first
                while True:
                    if isinstance(item, LLMGenerationResponse):
                        responses[index] = item
                        found = answers.end(index, item)
                    else:
                        found = answers.piece(index, item)
                    for each in found:
                        yield event(each)
                    if len(responses) == count:
                        break
                    index, item = await anext(items)
                if answers.asked.include_usage:
                    yield event(answers.usage_event([responses[index] for index in range(count)]))
                yield DONE
            except Exception as error:
                yield event(self.failure(error, "body").to_json())

    def _end_of_stream(self, client_left: bool) -> None:
        self._slots.give_back()
        if client_left:
            self.metrics.count_client_that_left()

    def failure(self, error: Exception, field: str) -> ApiError:
        """Return what a client is told about an error; the log has what it is not told."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, ValueError):
            return bad_request(error, RUNTIME_FIELDS, field)
        if isinstance(error, StoppedError):
            return ApiError(503, STOPS)
        if isinstance(error, EngineError):
            self.device_is_lost |= isinstance(error, DeviceLostError)
            logger.error("the engine failed: %s", error)
            return ApiError(500, f"the engine failed: {printable(str(error))}")
        logger.error("a request failed", exc_info=error)
        return ApiError(500, "the server's log says why")


async def _responses(items: Items) -> list[LLMGenerationResponse]:
    """Return all responses, in the order of the requests."""
    found: dict[int, LLMGenerationResponse] = {}
    async with aclosing(items):
        async for index, item in items:
            if isinstance(item, LLMGenerationResponse):
                found[index] = item
    return [found[index] for index in sorted(found)]


def json_response(content: dict[str, Any], status: int = 200) -> Response:
    """Return a response of JSON."""
    return Response(strict_json(content).encode(), status, media_type="application/json")
