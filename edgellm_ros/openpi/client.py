# SPDX-License-Identifier: Apache-2.0
"""PolicyClient: asks a policy on another computer for actions.

A connection that failed, was cancelled or took too long is closed, so that a late answer is never taken for
that of a later observation. The next observation connects again.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from edgellm_ros.echo import printable
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.openpi.token import HEADER, authorization
from edgellm_ros.openpi.wire import MISSING, pack, unpack

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

MAX_REPLY = 16 << 20  # bytes
POLL_S = 0.02  # how often a waiting client looks whether it is cancelled
CLOSE_S = 0.2


class PolicyClient:
    """A connection to a server of openpi's protocol; for one thread.

    - token: "" = none
    - timeout_s: for an answer, a new connection included
    - check_metadata: called with what the server tells when it connects; a ValueError refuses the server

    The first observation connects. ImportError without the package websockets.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        timeout_s: float = 5.0,
        check_metadata: Callable[[Any], None] = lambda metadata: None,
    ) -> None:
        try:
            import websockets.sync.client  # noqa: F401
        except ImportError:
            raise ImportError(MISSING) from None
        self._url = url
        self._token = token
        self._timeout_s = timeout_s
        self._check_metadata = check_metadata
        self._connection: ClientConnection | None = None
        self._closing = ExitStack()  # closes the connection

    def connect(self) -> Any:
        """Connect again, and return what the server tells about its policy.

        EngineError if it fails.
        """
        return self._connect(time.monotonic() + self._timeout_s, lambda: False)

    def _connect(self, end: float, cancelled: Callable[[], bool]) -> Any:
        """Connect until `end`; None, without a connection, if cancelled.

        end: s of the monotonic clock.
        """
        from websockets.exceptions import WebSocketException
        from websockets.sync.client import connect

        self.close()
        try:
            connecting = connect(
                self._url,
                additional_headers={HEADER: authorization(self._token)} if self._token else None,
                compression=None,
                open_timeout=max(end - time.monotonic(), POLL_S),
                close_timeout=CLOSE_S,
                ping_interval=None,  # each answer has its own time limit
                max_size=MAX_REPLY,
                proxy=None,
            )
            connection = self._closing.enter_context(connecting)
            # what was sent and not received for so long ends the connection
            connection.socket.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(self._timeout_s * 1000)
            )
            reply = self._receive(connection, end, cancelled)
            if reply is None:
                self.close()
                return None
            metadata = unpack(reply)
            self._check_metadata(metadata)
            self._connection = connection
        except (OSError, ValueError, WebSocketException) as error:
            self.close()
            raise self._failed("no connection", error) from None
        return metadata

    def infer(
        self, observation: Mapping[str, Any], cancelled: Callable[[], bool] = lambda: False
    ) -> np.ndarray | None:
        """Return the actions [T, A] float32 for an observation; None if cancelled.

        EngineError if the server cannot be reached, refuses the observation, is too late, or answers with
        something else.
        """
        from websockets.exceptions import WebSocketException
        from websockets.protocol import State

        message, end = pack(observation), time.monotonic() + self._timeout_s
        if self._connection is None or self._connection.state is not State.OPEN:  # the server may have left
            self._connect(end, cancelled)
        connection = self._connection
        if connection is None:
            return None
        done = False
        try:
            connection.send(message)
            reply = self._receive(connection, end, cancelled)
            if reply is None:
                return None
            actions = _actions(unpack(reply))
            done = True
            return actions
        except (OSError, ValueError, WebSocketException) as error:
            raise self._failed("no actions", error) from None
        finally:
            if not done:
                self.close()

    def close(self) -> None:
        """Close the connection; the next observation connects again."""
        self._connection = None
        self._closing.close()

    def _receive(
        self, connection: ClientConnection, end: float, cancelled: Callable[[], bool]
    ) -> bytes | None:
        """Wait for a message until `end`; None if cancelled.

        ValueError if none comes, or one of text.
        """
        while time.monotonic() < end:
            if cancelled():
                return None
            with suppress(TimeoutError):
                return self._binary(connection.recv(POLL_S))
        raise ValueError(f"no answer within {self._timeout_s:g} s")

    @staticmethod
    def _binary(reply: str | bytes) -> bytes:
        if isinstance(reply, str):  # openpi's servers send a traceback: its last line says what failed
            lines = [line for line in reply.splitlines() if line.strip()]
            raise ValueError(f"the server says: {printable(lines[-1].strip() if lines else 'nothing')}")
        return reply

    def _failed(self, what: str, error: Exception) -> EngineError:
        text = " ".join(str(error).split()) or type(error).__name__
        return EngineError(f"{what} from {printable(self._url)}: {printable(text)}")


def _actions(answer: Any) -> np.ndarray:
    """Return the actions of an answer.

    ValueError for one without finite numbers [T, A].
    """
    actions = answer.get("actions") if isinstance(answer, dict) else None
    if not isinstance(actions, np.ndarray) or actions.ndim != 2 or actions.dtype.kind not in "iuf":
        told = f"{actions.dtype} {list(actions.shape)}" if isinstance(actions, np.ndarray) else "none"
        raise ValueError(f"an answer must have actions [T, A] of numbers, got {told}")
    with np.errstate(over="ignore"):  # which isfinite tells
        actions = actions.astype(np.float32)
    if not np.isfinite(actions).all():
        raise ValueError("the actions are not finite")
    return actions
