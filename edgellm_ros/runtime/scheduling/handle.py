# SPDX-License-Identifier: Apache-2.0
"""Handle: the client's end of a submitted request."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from edgellm_ros.runtime.request import LLMGenerationResponse


@dataclass(frozen=True)
class TextPiece:
    """What an answer has grown by.

    A piece may lack text, while a character or a possible stop string is not complete, or tokens, when held
    back text follows at the end.
    """

    text: str  # new characters; never withdrawn
    token_ids: tuple[int, ...]  # new tokens
    # of each new token, if they were requested: token ids with their log-probabilities, as in the response
    logprobs: tuple[list[tuple[int, float]], ...] = ()


class Outcome:
    """Pieces of an answer, then its response or error; thread-safe."""

    def __init__(self) -> None:
        lock = threading.Lock()
        self._grown = threading.Condition(lock)
        self._ended = threading.Condition(lock)  # so a piece does not wake threads that wait for the end
        self._pieces: list[TextPiece] = []
        self._response: LLMGenerationResponse | None = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self._response is not None or self._error is not None

    def push(self, piece: TextPiece) -> None:
        """Add a piece."""
        with self._grown:
            self._pieces.append(piece)
            self._grown.notify_all()

    def finish(self, response: LLMGenerationResponse) -> None:
        """End with a response; without effect after the end."""
        with self._grown:
            if not self.done:
                self._response = response
            self._wake_all()

    def fail(self, error: BaseException) -> None:
        """End with an error; without effect after the end."""
        with self._grown:
            if not self.done:
                self._error = error
            self._wake_all()

    def pieces(self) -> Iterator[TextPiece]:
        """Yield all pieces, then raise the error if there is one."""
        for index in itertools.count():
            with self._grown:
                self._grown.wait_for(partial(self._has, index))
                if index == len(self._pieces):
                    break
                piece = self._pieces[index]
            yield piece
        if self._error is not None:
            raise self._error

    def _has(self, index: int) -> bool:
        return index < len(self._pieces) or self.done

    def _wake_all(self) -> None:
        self._grown.notify_all()
        self._ended.notify_all()

    def wait(self, timeout: float | None) -> LLMGenerationResponse:
        """Wait for the end; TimeoutError after `timeout` seconds."""
        with self._ended:
            if not self._ended.wait_for(lambda: self.done, timeout):
                raise TimeoutError(f"the request has not ended within {timeout} s")
        if self._error is not None:
            raise self._error
        assert self._response is not None
        return self._response


class Handle:
    """A submitted request; all methods may be called from any thread.

    A handle that is dropped does not cancel its request.
    """

    def __init__(
        self,
        outcome: Outcome,
        cancel: Callable[[], None],
        raise_priority: Callable[[int], None] = lambda priority: None,
    ) -> None:
        self._outcome = outcome
        self._cancel = cancel
        self._raise_priority = raise_priority

    def __iter__(self) -> Iterator[TextPiece]:
        """Iterate over the pieces of the answer as they are decoded.

        Begins with the first piece, ends with the answer; raises what `result` raises.
        """
        return self._outcome.pieces()

    def result(self, timeout: float | None = None) -> LLMGenerationResponse:
        """Wait for the response.

        TimeoutError if the request has not ended within `timeout` seconds, or if its deadline passed before
        it was begun; EngineError if an engine failed or the runtime was closed; ValueError if the adapter or
        LM head of the request was removed before it was begun; what its `on_progress` raised.
        """
        return self._outcome.wait(timeout)

    def cancel(self) -> None:
        """End the request at its next token; the response has what there is until then.

        A request that has not begun ends without tokens. Without effect after the end.
        """
        self._cancel()

    def raise_priority(self, priority: int) -> None:
        """Give the request this priority from its next turn on, if it is above its own."""
        self._raise_priority(priority)

    @property
    def done(self) -> bool:
        """Whether the request has ended, with a response or an error."""
        return self._outcome.done
