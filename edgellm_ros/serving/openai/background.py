# SPDX-License-Identifier: Apache-2.0
"""A server of OpenAI's API beside other work of its process."""

from __future__ import annotations

import threading
import time

from edgellm_ros.serving.listening import Listening
from edgellm_ros.serving.openai.app import OpenAIApp
from edgellm_ros.serving.openai.server import STALL_S, OpenAIServer

STOP_S = 1.0  # for answers that are under way to end at their next tokens
LOOK_S = 0.02


class BackgroundServer:
    """Serves an application on a thread of its own, from the beginning to `close`.

    The application stays open, and may be served again. OSError if the server cannot listen.
    """

    def __init__(self, app: OpenAIApp, listening: Listening, stall_s: float = STALL_S) -> None:
        self._app = app
        self._server = OpenAIServer(app.asgi, listening, stall_s)
        self._thread = threading.Thread(
            target=self._server.run, args=(lambda port: None,), name="edgellm-serve"
        )
        self._thread.start()

    @property
    def port(self) -> int:
        return self._server.port

    def close(self) -> None:
        """Listen no more, end the requests that are under way, and the thread.

        Their clients are told: with the status 503, or in a stream with an event `error`.
        """
        self._server.stop()
        end = time.monotonic() + STOP_S
        while self._thread.is_alive() and time.monotonic() < end:
            self._app.cancel_requests()  # again, as one may have been begun meanwhile
            self._thread.join(LOOK_S)
        self._server.stop()  # without those that do not read
        self._thread.join()
