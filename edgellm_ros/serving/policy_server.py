# SPDX-License-Identifier: Apache-2.0
r"""PolicyServer: openpi's websocket protocol around a PolicyService.

    client                          server
      | -- GET /, Authorization -->   |     one connection per robot
      | <------- metadata ----------  |
      | ------ observation -------->  |  \
      | <------- actions -----------  |  /  again and again; a text in place of actions is an error

One thread plans. Each client has at most one observation in its queue, so clients take turns.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from edgellm_ros.echo import printable
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.openpi.token import HEADER, has_token
from edgellm_ros.openpi.wire import MISSING, pack
from edgellm_ros.serving.listening import Listening
from edgellm_ros.serving.policy_service import TIMING, PolicyService

if TYPE_CHECKING:
    from websockets.asyncio.server import Request, Response, ServerConnection

HEALTH = "/healthz"
FAILED, TRY_LATER = 1011, 1013  # codes of closed connections
HANDSHAKE_S, CLOSE_S, ALIVE_S = 5.0, 2.0, 20.0

logger = logging.getLogger(__name__)
_websockets = logging.getLogger(f"{__name__}.websockets")
_websockets.setLevel(logging.WARNING)
# websockets before 17 logs whatever is no handshake with a traceback
_websockets.addFilter(lambda record: "opening handshake failed" not in record.getMessage())


@dataclass(frozen=True)
class ServerOptions:
    """Where a server listens, and its limits."""

    listening: Listening
    max_message_bytes: int = 16 << 20
    max_clients: int = 4


class PolicyServer:
    """Serves one policy to several robots, one plan at a time.

    ImportError without the package websockets.
    """

    def __init__(self, service: PolicyService, options: ServerOptions) -> None:
        try:
            import websockets.asyncio.server  # noqa: F401
        except ImportError:
            raise ImportError(MISSING) from None
        self._service = service
        self._options = options
        self._clients: set[ServerConnection] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = asyncio.Event()

    async def run(self, ready: Callable[[int], None]) -> None:
        """Serve until `stop`; `ready` is called with the port.

        OSError if it cannot listen.
        """
        from websockets.asyncio.server import serve

        options = self._options
        self._loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, "policy") as self._worker:
            async with serve(
                self._serve_client,
                options.listening.host,
                options.listening.port,
                process_request=self._check_request,
                origins=[None],  # no web page may connect
                compression=None,  # no small message that becomes a large one
                max_size=options.max_message_bytes,
                max_queue=1,
                open_timeout=HANDSHAKE_S,
                close_timeout=CLOSE_S,
                ping_interval=ALIVE_S,
                ping_timeout=ALIVE_S,
                server_header=None,
                logger=_websockets,
            ) as server:
                ready(next(iter(server.sockets)).getsockname()[1])
                await self._stopped.wait()

    def stop(self) -> None:
        """End `run`, after the plan that is computed; from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stopped.set)

    def _check_request(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer a request that becomes no connection; None for one that does.

        Health, a wrong token, one client too many.
        """
        if request.path == HEALTH:
            return connection.respond(HTTPStatus.OK, "OK\n")
        if not has_token(request.headers.get_all(HEADER), self._options.listening.token):
            logger.warning("%s: refused, without the token", _address(connection))
            return connection.respond(
                HTTPStatus.UNAUTHORIZED, f"expected the header {HEADER}: Api-Key TOKEN\n"
            )
        if self._is_full:
            logger.warning("%s: refused, %d clients are connected", _address(connection), len(self._clients))
            return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, f"{self._full}\n")
        return None

    @property
    def _is_full(self) -> bool:
        return len(self._clients) >= self._options.max_clients

    @property
    def _full(self) -> str:
        return f"this server has {self._options.max_clients} clients at most"

    async def _serve_client(self, connection: ServerConnection) -> None:
        from websockets.exceptions import ConnectionClosed

        if self._is_full:  # of handshakes at the same time, all passed the check
            await connection.close(TRY_LATER, self._full)
            return
        self._clients.add(connection)
        logger.info("%s: connected", _address(connection))
        try:
            await connection.send(pack(self._service.metadata))
            await self._answer_observations(connection)
        except ConnectionClosed as error:
            logger.info("%s: %s", _address(connection), printable(str(error)))
        finally:
            self._clients.discard(connection)

    async def _answer_observations(self, connection: ServerConnection) -> None:
        assert self._loop is not None
        before: float | None = None  # ms that the last observation took, its transfer to the client included
        async for message in connection:
            began = time.perf_counter()
            try:
                if isinstance(message, str):
                    raise ValueError("an observation must be a binary message, got a text")
                answer: dict[str, Any] = await self._loop.run_in_executor(
                    self._worker, self._service.answer, message
                )
            except ValueError as error:
                await connection.send(" ".join(str(error).split()))
                continue
            except Exception as error:
                logger.exception("%s: the policy failed", _address(connection))
                why = str(error) if isinstance(error, EngineError) else "the server's log says why"
                await connection.send(f"the policy failed: {printable(why)}")
                await connection.close(FAILED, "the policy failed")
                return
            if before is not None:
                answer[TIMING]["prev_total_ms"] = before
            await connection.send(pack(answer))
            before = (time.perf_counter() - began) * 1000


def _address(connection: ServerConnection) -> str:
    address = connection.remote_address
    return f"{address[0]}:{address[1]}" if address else "a client"
