# SPDX-License-Identifier: Apache-2.0
"""Who is answered: the token, web pages, and the form of a request's body."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request

from edgellm_ros.echo import quoted
from edgellm_ros.openpi.token import BEARER, HEADER, has_token
from edgellm_ros.serving.openai.errors import ApiError
from edgellm_ros.serving.openai.limits import Limits
from edgellm_ros.serving.openai.streams import ClientLeftError
from edgellm_ros.strict_json import parse_json

MOST_HEAD_BYTES = 32 << 10  # of all headers
JSON_TYPE = "application/json"


def check_access(headers: Headers, token: str) -> None:
    """Refuse a web page, and a client without the token. ApiError 401, 403 or 431."""
    if sum(len(name) + len(value) for name, value in headers.raw) > MOST_HEAD_BYTES:
        raise ApiError(431, f"headers: expected at most {MOST_HEAD_BYTES} bytes", "headers")
    if "origin" in headers:
        raise ApiError(403, "Origin: web pages are not answered", "Origin")
    if not has_token(headers.getlist(HEADER), token, BEARER):
        message = f"{HEADER}: expected {BEARER} TOKEN with the server's token (api_key of OpenAI's clients)"
        raise ApiError(401, message, HEADER, "invalid_api_key")


async def read_body(request: Request, limits: Limits) -> bytes:
    """Return the body.

    ApiError 408, 413 or 415 for one that is late, too large, or not JSON by its headers. ClientLeftError.
    """
    _check_headers(request.headers, limits)
    try:
        return await asyncio.wait_for(_receive(request, limits), limits.body_s)
    except asyncio.TimeoutError:
        raise ApiError(408, f"body: it was not there within {limits.body_s:g} s", "body") from None
    except ClientDisconnect:
        raise ClientLeftError from None


def parse_body(body: bytes) -> Any:
    """Parse a body. ApiError 400 if it is not JSON in UTF-8."""
    try:
        return parse_json(body)
    except ValueError as error:
        raise ApiError(400, f"body: {error}", "body") from None


def _check_headers(headers: Headers, limits: Limits) -> None:
    kind, _, parameters = headers.get("content-type", "").partition(";")
    charset = parameters.strip().lower()
    if kind.strip().lower() != JSON_TYPE or charset.replace('"', "") not in ("", "charset=utf-8"):
        given = quoted(headers.get("content-type"))
        raise ApiError(415, f"Content-Type: expected {JSON_TYPE}, in UTF-8, got {given}", "Content-Type")
    if headers.get("content-encoding", "identity").lower() != "identity":
        given = quoted(headers["content-encoding"])
        raise ApiError(415, f"Content-Encoding: expected a body as it is, got {given}", "Content-Encoding")
    length = headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > limits.max_body_bytes:
        raise _too_large(limits)


async def _receive(request: Request, limits: Limits) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limits.max_body_bytes:
            raise _too_large(limits)
    return bytes(body)


def _too_large(limits: Limits) -> ApiError:
    return ApiError(413, f"body: expected at most {limits.max_body_bytes} bytes", "body")
