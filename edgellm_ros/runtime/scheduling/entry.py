# SPDX-License-Identifier: Apache-2.0
"""Entry: the scheduler's end of a submitted request."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence

from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.policy.sequence import PolicySequence
from edgellm_ros.runtime.request import LLMGenerationRequest, LLMGenerationResponse, Progress
from edgellm_ros.runtime.scheduling.handle import Handle, Outcome, TextPiece

Clock = Callable[[], float]  # seconds; that of deadlines


class Stop(threading.Event):
    """Set by `set`, by the request's own `cancel`, and after the deadline."""

    def __init__(self, given: threading.Event | None, deadline: float | None, clock: Clock) -> None:
        super().__init__()
        self._given, self._deadline, self._clock = given, deadline, clock

    @property
    def is_late(self) -> bool:
        """Whether the deadline has passed."""
        return self._deadline is not None and self._clock() >= self._deadline

    def is_set(self) -> bool:
        """Return whether the request is to end."""
        return super().is_set() or (self._given is not None and self._given.is_set()) or self.is_late


class Entry:
    """A request from the queue to its end.

    - request: the submitted one, which reports to this entry and asks it whether to stop
    - sequence: what the pipeline made of the request
    - submitted: time of the submission; number: how many came before
    """

    def __init__(
        self,
        request: LLMGenerationRequest,
        *,
        priority: int,
        deadline: float | None,
        clock: Clock,
        changed: Callable[[], None],
    ) -> None:
        self.priority = priority
        self.deadline = deadline
        self.submitted = clock()
        self.number = 0
        self.sequence: GenerationSequence | PolicySequence | None = None
        self.error: Exception | None = None  # of the client's `on_progress`
        self.stop = Stop(request.cancel, deadline, clock)
        self.outcome = Outcome()
        self._changed = changed
        self._on_progress = request.on_progress
        self._sent_text = self._sent_tokens = 0
        self.request = dataclasses.replace(request, on_progress=self._report, cancel=self.stop)
        self.handle = Handle(self.outcome, self.cancel)

    def cancel(self) -> None:
        """End the request at its next token."""
        self.stop.set()
        self._changed()

    def finish(self, response: LLMGenerationResponse) -> None:
        """End with a response, or with the error of the client's `on_progress`."""
        if self.error is not None:
            self.outcome.fail(self.error)
            return
        self._push(response.text, response.token_ids)
        self.outcome.finish(response)

    def fail(self, error: BaseException) -> None:
        """End with an error."""
        self.outcome.fail(error)

    def _report(self, progress: Progress) -> None:
        """Pass progress on to the client; its errors end this request only."""
        if progress.tokens < self._sent_tokens:
            return  # the answer is computed again
        if self._on_progress is not None and self.error is None:
            try:
                self._on_progress(progress)
            except Exception as error:  # the client's code may raise anything
                self.error = error
                self.stop.set()
        if isinstance(self.sequence, GenerationSequence):
            self._push(progress.text, self.sequence.generated)

    def _push(self, text: str, tokens: Sequence[int]) -> None:
        """Push what the answer has grown by."""
        piece = TextPiece(text[self._sent_text :], tuple(tokens[self._sent_tokens :]))
        self._sent_text, self._sent_tokens = (
            max(self._sent_text, len(text)),
            max(self._sent_tokens, len(tokens)),
        )
        if piece.text or piece.token_ids:
            self.outcome.push(piece)
