# SPDX-License-Identifier: Apache-2.0
"""Streams of server-sent events, and clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edgellm_ros.strict_json import strict_json

T = TypeVar("T")
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
DONE = b"data: [DONE]\n\n"


class ClientLeftError(Exception):
    """The client closed its connection before its answer was complete."""


async def unless_client_leaves(work: Awaitable[T], receive: Receive) -> T:
    """Return what `work` returns, which is cancelled if the client leaves.

    The body must have been read. ClientLeftError then.
    """
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientLeftError
    finally:
        for each in (task, left):
            each.cancel()
            with suppress(BaseException):
                await each


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(content: dict[str, Any]) -> bytes:
    """Return an event with a JSON object."""
    return b"data: " + strict_json(content).encode() + b"\n\n"


class EventStream(Response):
    """Sends events until there are no more or the client leaves.

    - events: closed in each case
    - at_end: called last, with whether the client left
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], at_end: Callable[[bool], None]) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._at_end = at_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        left = False
        try:
            await unless_client_leaves(self._send(send), receive)
        except ClientLeftError:
            left = True
        except asyncio.CancelledError:  # the server stops, and closes the connection
            pass
        finally:
            await self._events.aclose()
            self._at_end(left)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
            await asyncio.sleep(0)  # other clients have a turn, and this one may have left
        await send({"type": "http.response.body", "body": b"", "more_body": False})
