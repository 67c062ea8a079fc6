# SPDX-License-Identifier: Apache-2.0
"""Serves an ASGI application by uvicorn, with limits of time on every connection."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from edgellm_ros.serving.listening import Listening
from edgellm_ros.serving.openai.access import MOST_HEAD_BYTES
from edgellm_ros.serving.openai.errors import ApiError
from edgellm_ros.strict_json import strict_json

HEAD_S = 10.0  # for the line and the headers of a request
STALL_S = 30.0  # for a client that reads nothing of its answer
STOP_S = 5  # for answers that are under way when the server stops
MOST_CONNECTIONS = 512
BACKLOG = 128

logger = logging.getLogger(__name__)


class OpenAIServer:
    """Listens, and serves until `stop` or a signal.

    - stall_s: seconds without progress after which a client that does not read is disconnected

    OSError if it cannot listen.
    """

    def __init__(self, app: Any, listening: Listening, stall_s: float = STALL_S) -> None:
        family = socket.AF_INET6 if ":" in listening.host else socket.AF_INET
        self._socket = socket.create_server((listening.host, listening.port), family=family, backlog=BACKLOG)
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app,
            http=type("Connection", (_Connection,), {"stall_s": stall_s}),
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=STOP_S,
            h11_max_incomplete_event_size=2 * MOST_HEAD_BYTES,
            backlog=BACKLOG,
        )
        self._server = _Server(config)
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, ready: Callable[[int], None]) -> None:
        """Serve; `ready` is called with the port."""
        asyncio.run(self._run(ready))

    def stop(self) -> None:
        """End `run`, from any thread; if it is called again, without waiting for answers."""
        self._server.force_exit = self._server.should_exit
        self._server.should_exit = True
        if self._server.force_exit and self._loop is not None:
            with suppress(RuntimeError):  # the loop was closed: the server has stopped
                self._loop.call_soon_threadsafe(self._disconnect)

    def _disconnect(self) -> None:
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()

    async def _run(self, ready: Callable[[int], None]) -> None:
        self._loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._loop.add_signal_handler(number, self.stop)
        ready(self.port)  # connections wait in the backlog
        await self._server.serve(sockets=[self._socket])


class _Server(uvicorn.Server):
    """uvicorn's server without its handlers of signals, which end the process."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Connection(H11Protocol):
    """A connection whose client must send its head, and read its answer, in time.

    What is not HTTP is answered in the format of the other errors.
    """

    stall_s: float

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._head: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        if len(self.connections) > MOST_CONNECTIONS:
            logger.warning("%s: refused, %d connections are open", self.client, MOST_CONNECTIONS)
            transport.abort()
        self._limit_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._head, self._stall):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._limit_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall = self.loop.call_later(self.stall_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self.loop.call_later(self.stall_s, self.transport.abort)  # if the end of an answer is not read

    def send_400_response(self, msg: str) -> None:
        reason = sys.exc_info()[1]
        error = ApiError(400, f"request: not valid HTTP: {reason or msg}", "request")
        body = strict_json(error.to_json()).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        for each in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(each) or b"")
        self.transport.close()

    def _limit_head(self) -> None:
        """Start a timer while a head is incomplete."""
        waits = self.conn.their_state is h11.IDLE
        if waits and self._head is None:
            self._head = self.loop.call_later(HEAD_S, self.transport.abort)
        elif not waits and self._head is not None:
            self._head.cancel()
            self._head = None
