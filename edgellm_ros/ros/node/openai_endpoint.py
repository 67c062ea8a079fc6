# SPDX-License-Identifier: Apache-2.0
"""OpenAI's HTTP API on the node's runtime, by the parameters `serve_*`.

Imports packages that a node without the endpoint does not need.
"""

from __future__ import annotations

from contextlib import ExitStack

from edgellm_ros.ros.node.settings.live_parameters import LiveParameters
from edgellm_ros.ros.node.settings.priorities import MOST_PRIORITY, parse_priorities
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest
from edgellm_ros.runtime.scheduling.handle import Handle
from edgellm_ros.serving.listening import url_host
from edgellm_ros.serving.openai.background import BackgroundServer
from edgellm_ros.serving.openai.opening import model_name, open_app

CLIENT = "serve"  # its name in `client_priorities`


class OpenAIEndpoint:
    """The server of a configured node, which listens from `open` to `close`.

    Its requests go to the runtime at once, not to the queue of goals. They have the lowest priority of
    goals unless `client_priorities` has another for CLIENT, so plans come first.

    - url: while it listens; "" = it does not
    """

    def __init__(self, runtime: LLMInferenceRuntime, parameters: LiveParameters) -> None:
        """Make the application.

        OSError or ValueError for a token or a host that cannot be used.
        """
        start = parameters.current
        self._runtime = runtime
        self._parameters = parameters
        self._listening = start.serve_listening()
        self._opened = ExitStack()
        self._app = self._opened.enter_context(
            open_app(
                runtime,
                start.serve_model_name or model_name(start.engine_dir),
                start.serve_limits(runtime.config.builder.max_kv_cache_capacity),
                self._listening.token,
                self._submit,
            )
        )
        self._server: BackgroundServer | None = None
        self.url = ""

    def open(self) -> None:
        """Listen. OSError if the port cannot be used."""
        self._server = BackgroundServer(self._app, self._listening)
        self.url = f"http://{url_host(self._listening.host)}:{self._server.port}/v1"

    def close(self) -> None:
        """Listen no more, and end the requests that are under way; may be called twice."""
        server, self._server, self.url = self._server, None, ""
        if server is not None:
            server.close()

    def destroy(self) -> None:
        """End the threads of the application too; may be called twice."""
        self.close()
        self._opened.close()

    @property
    def is_busy(self) -> bool:
        """Whether a request is being answered, or waits."""
        return self._app.values()["requests_running"] > 0

    def values(self) -> dict[str, float]:
        """Return counters since configure by name."""
        return {f"{CLIENT}_{name}": value for name, value in self._app.values().items()}

    def _submit(self, request: LLMGenerationRequest) -> Handle:
        priorities = parse_priorities(self._parameters.current.client_priorities)
        return self._runtime.submit(request, priorities.get(CLIENT, -MOST_PRIORITY))
