# SPDX-License-Identifier: Apache-2.0
"""What the server needs of a runtime that answers several requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from edgellm_ros.runtime.request import LLMGenerationRequest, LLMGenerationResponse


class Piece(Protocol):
    """A piece of an answer as it is decoded."""

    @property
    def text(self) -> str: ...


class Handle(Protocol):
    """A request that was submitted."""

    def __iter__(self) -> Iterator[Piece]:
        """Yield pieces as they are decoded, until the request has ended."""

    def result(self, timeout: float | None = None) -> LLMGenerationResponse:
        """Wait for the whole answer. Raises the error of `handle_request`."""

    def cancel(self) -> None:
        """End the request as soon as possible; no effect once it has ended."""

    @property
    def done(self) -> bool: ...


class Submit(Protocol):
    """Submits a request, from any thread.

    It may make the prompt, but does not wait for the answer. ValueError for an invalid request, which the
    handle may raise too.
    """

    def __call__(
        self, request: LLMGenerationRequest, priority: int = 0, deadline: float | None = None
    ) -> Handle: ...
