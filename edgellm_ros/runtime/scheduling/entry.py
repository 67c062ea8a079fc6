# SPDX-License-Identifier: Apache-2.0
"""Entry: the scheduler's end of a submitted request."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from edgellm_ros.engine.errors import DeviceLostError
from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.encoders import EncoderRun
from edgellm_ros.runtime.metrics import StageClock
from edgellm_ros.runtime.request import LLMGenerationRequest, LLMGenerationResponse, Progress
from edgellm_ros.runtime.scheduling.handle import Handle, Outcome, TextPiece
from edgellm_ros.runtime.scheduling.shares import Share
from edgellm_ros.runtime.stages.prompts_in_parts import PromptsInParts

AGING_S = 2.0  # seconds of waiting that raise a request's level by one
Clock = Callable[[], float]  # seconds; that of deadlines


def _weak(method: Callable[..., None]) -> Callable[..., None]:
    """Return a bound method that does not keep its object, and does nothing after it."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(*arguments)

    return call


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
    - sequence: what `Answerer.prepare_one` made of the request
    - number: how many requests were submitted before
    - counted: tokens of its answer that were charged to its share
    - kept: the sequence that lost its row, the longest of several; None = it has not lost any
    - prompts: while its prompt is computed; stages: its clock, since it was begun; slot: of encoder rows
    - first_token: waits for it and delivers it; None = it was delivered, or the prompt is not complete
    - runs, run: of encoders, and the next one that its prompt waits for; None = it waits for none
    - interrupts: of this run
    """

    slot: int
    stages: StageClock
    runs: Iterator[EncoderRun]
    run: EncoderRun | None = None
    interrupts: int = 0

    def __init__(
        self,
        request: LLMGenerationRequest,
        *,
        share: Share,
        priority: int,
        deadline: float | None,
        clock: Clock,
        changed: Callable[[], None],
    ) -> None:
        self.share = share
        self.counted = 0
        self.priority = priority
        self.deadline = deadline
        self.number = 0
        self.sampled = 0  # the turn of the latest part of its trajectories
        self.sequence: Any = None
        self.kept: GenerationSequence | None = None
        self.prompts: PromptsInParts | None = None
        self.first_token: Callable[[], None] | None = None
        self.error: Exception | None = None  # of the client's `on_progress`
        self.stop = Stop(request.cancel, deadline, clock)
        self.outcome = Outcome()
        self._changed = changed
        self._waits_since: float | None = clock()
        self._waited = 0.0
        self._queued: float | None = None  # seconds until it was first begun
        self._on_progress = request.on_progress
        self._sent_text = self._sent_tokens = 0
        # the handle and the request do not keep the entry, so that nothing of it is left to collect
        self.request = dataclasses.replace(request, on_progress=_weak(self._report), cancel=self.stop)
        self.handle = Handle(self.outcome, _weak(self.cancel), _weak(self.raise_priority))

    @property
    def is_prompted(self) -> bool:
        """Whether its prompt is complete, once it has a row."""
        return self.prompts is None and self.run is None

    @property
    def has_one_token(self) -> bool:
        """Whether its answer ends with the first token, which was not delivered."""
        return self.first_token is not None and self.sequence.tokens_left < 2

    def wait(self, now: float) -> None:
        """Begin to wait for a row, or for requests of a higher priority."""
        if self._waits_since is None:
            self._waits_since = now

    def go(self, now: float) -> float:
        """End to wait; return the seconds since its beginning, 0 without one."""
        seconds = self.waited(now) - self._waited
        self._waited, self._waits_since = self._waited + seconds, None
        if self._queued is None:
            self._queued = self._waited
        return seconds

    def waited(self, now: float) -> float:
        """Return the seconds that it has waited."""
        return self._waited + (0.0 if self._waits_since is None else now - self._waits_since)

    def level(self, now: float) -> int:
        """Return the priority, which rises while the request waits."""
        return self.priority + int(self.waited(now) / AGING_S)

    def seconds(self, stages: Mapping[str, float]) -> dict[str, float]:
        """Return the seconds of its stages with those in the queue."""
        queued = self._queued or 0.0
        totals = {name: queued + stages[name] for name in ("first_token_s", "total_s")}
        return {**stages, "queued_s": queued, **totals}

    def cancel(self) -> None:
        """End the request at its next token."""
        self.stop.set()
        self._changed()

    def raise_priority(self, priority: int) -> None:
        """Have at least this priority from the next turn on."""
        if priority > self.priority:
            self.priority = priority
            self._changed()

    def finish(self, response: LLMGenerationResponse) -> None:
        """End with a response, or with the error of the client's `on_progress`."""
        if self.error is not None:
            self.outcome.fail(self.error)
            return
        self._push(response.text, response.token_ids, response.logprobs or ())
        self.outcome.finish(response)

    def fail(self, error: BaseException) -> None:
        """End with an error."""
        self.share.lost_device |= isinstance(error, DeviceLostError)
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
            self._push(progress.text, self.sequence.generated, self.sequence.logprobs)

    def _push(self, text: str, tokens: Sequence[int], logprobs: Sequence[list[tuple[int, float]]]) -> None:
        """Push what the answer has grown by."""
        sent = self._sent_tokens
        piece = TextPiece(text[self._sent_text :], tuple(tokens[sent:]), tuple(logprobs[sent:]))
        self._sent_text = max(self._sent_text, len(text))
        self._sent_tokens = max(self._sent_tokens, len(tokens))
        if piece.text or piece.token_ids:
            self.outcome.push(piece)
