# SPDX-License-Identifier: Apache-2.0
"""The ASGI application: OpenAI's endpoints, health and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edgellm_ros.echo import printable
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.serving.openai.access import check_access
from edgellm_ros.serving.openai.answering import STOPS, Answering, Whole, json_response
from edgellm_ros.serving.openai.errors import ApiError
from edgellm_ros.serving.openai.limits import Limits
from edgellm_ros.serving.openai.metrics import CONTENT_TYPE
from edgellm_ros.serving.openai.models import Models
from edgellm_ros.serving.openai.runs import Submit
from edgellm_ros.serving.openai.streams import ClientLeftError
from edgellm_ros.serving.openai.wire.answers import Answers, ChatAnswers, TextAnswers, embeddings
from edgellm_ros.serving.openai.wire.asked import Asked
from edgellm_ros.serving.openai.wire.chat import read_chat
from edgellm_ros.serving.openai.wire.completions import Encode, read_completion, read_embedding
from edgellm_ros.serving.openai.wire.logprobs import Vocabulary

CLIENT_LEFT = 499  # as nginx counts it; no client sees it
RETRY_AFTER_S = 1

Endpoint = Callable[[Request], Awaitable[Response]]


class OpenAIApp:
    """OpenAI's endpoints; `asgi` is the application.

    - submit: gives requests to the runtime
    - encode: converts a text to the ids of a whole prompt
    - token: that clients must send; "" = none

    ValueError for an engine that answers with no text.
    """

    def __init__(
        self,
        submit: Submit,
        config: EngineConfig,
        models: Models,
        *,
        vocabulary: Vocabulary,
        encode: Encode,
        limits: Limits,
        token: str = "",
    ) -> None:
        config.check_answers_with_text("OpenAI's API")
        self._config = config
        self._models = models
        self._vocabulary = vocabulary
        self._encode = encode
        self._limits = limits
        self._token = token
        self._answering = Answering(submit, limits)
        routes = [
            self._route("/health", self._health, "GET", is_open=True),
            self._route("/metrics", self._metrics, "GET"),
            self._route("/v1/models", self._list_models, "GET"),
            self._route("/v1/models/{model:path}", self._show_model, "GET"),
            self._route("/v1/chat/completions", self._chat, "POST"),
            self._route("/v1/completions", self._complete, "POST"),
            self._route("/v1/embeddings", self._embed, "POST"),
        ]
        self.asgi = Starlette(routes=routes, exception_handlers={HTTPException: _no_route})
        self.asgi.router.redirect_slashes = False

    def close(self) -> None:
        """End the threads, once the requests have ended."""
        self._answering.close()

    def cancel_requests(self) -> None:
        """End the requests that are under way, from any thread: their status is 503."""
        self._answering.cancel()

    def values(self) -> dict[str, float]:
        """Return counters by name, from any thread."""
        return self._answering.metrics.values()

    def check_health(self) -> None:
        """Raise ApiError 503 if no request can be answered any more."""
        if self._answering.device_is_lost:
            raise ApiError(503, "the device is lost: start the server again")

    def _route(self, path: str, endpoint: Endpoint, method: str, is_open: bool = False) -> Route:
        """Return a route that is counted, and whose errors are answers."""

        async def answer(request: Request) -> Response:
            try:
                if not is_open:
                    check_access(request.headers, self._token)
                response = await endpoint(request)
            except ClientLeftError:
                self._answering.metrics.count_client_that_left()
                response = Response(status_code=CLIENT_LEFT)
            except asyncio.CancelledError:
                response = _error(ApiError(503, STOPS))
            except Exception as error:
                response = _error(self._answering.failure(error, "body"))
            self._answering.metrics.count_request(path, response.status_code)
            return response

        return Route(path, answer, methods=[method])

    async def _health(self, request: Request) -> Response:
        self.check_health()
        return json_response({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        return Response(self._answering.metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def _list_models(self, request: Request) -> Response:
        return json_response(self._models.listed())

    async def _show_model(self, request: Request) -> Response:
        return json_response(self._models.entry(request.path_params["model"]))

    async def _chat(self, request: Request) -> Response:
        def read(content: Any) -> Answers:
            asked = read_chat(content, self._config, self._models, self._limits)
            return ChatAnswers(asked, self._vocabulary)

        return await self._answering.answer(request, read, "messages")

    async def _complete(self, request: Request) -> Response:
        def read(content: Any) -> Answers:
            asked = read_completion(content, self._encode, self._models, self._config, self._limits)
            return TextAnswers(asked, self._vocabulary)

        return await self._answering.answer(request, read, "prompt")

    async def _embed(self, request: Request) -> Response:
        def read(content: Any) -> tuple[Asked, Whole]:
            asked, as_base64 = read_embedding(content, self._encode, self._models, self._config)
            return asked, partial(embeddings, asked, as_base64)

        return await self._answering.answer_whole(request, read, "input")


async def _no_route(request: Request, error: Exception) -> Response:
    """Answer a request to a path or with a method that there is not."""
    assert isinstance(error, HTTPException)
    part = "method" if error.status_code == 405 else "path"
    message = f"{part}: {request.method} {printable(request.url.path)} is no endpoint of this server"
    response = _error(ApiError(error.status_code, message, part))
    response.headers.update(error.headers or {})
    return response


def _error(error: ApiError) -> Response:
    response = json_response(error.to_json(), error.status)
    if error.status == 429:
        response.headers["retry-after"] = str(RETRY_AFTER_S)
    if error.status in (408, 413, 415, 431):  # the rest of the body is not read
        response.headers["connection"] = "close"
    return response
