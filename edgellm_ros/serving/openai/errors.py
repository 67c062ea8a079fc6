# SPDX-License-Identifier: Apache-2.0
"""Errors in OpenAI's JSON format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# A field's place at the beginning of an error, such as `messages[1].content[0]: ...` or `seed must be ...`.
FIELD = re.compile(r"([a-z_]+)((?:\[\d+\]|\.\w+)*)(?!\w)")

CAPACITY = "(max_kv_cache_capacity)"  # in errors of prompts that are too long
TOO_LONG = "context_length_exceeded"


class ApiError(Exception):
    """A request that is not answered, and why.

    - param: the field, header or other part of the request that is wrong
    - code: for programs, such as "model_not_found"
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = " ".join(message.split())
        self.param = param
        self.code = code

    def to_json(self) -> dict[str, Any]:
        """Return the error as JSON types."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def bad_request(error: ValueError, fields: Mapping[str, str], default: str) -> ApiError:
    """Return the error of a request that the runtime or a reader of messages refuses.

    fields: names at the beginning of errors -> fields of the request; other errors are about the field
    `default`.
    """
    message = " ".join(str(error).split())
    found = FIELD.match(message)
    param = f"{fields[found[1]]}{found[2]}" if found is not None and found[1] in fields else default
    if not message.startswith(param):
        message = f"{param}: {message}"
    return ApiError(400, message, param, TOO_LONG if CAPACITY in message else None)
