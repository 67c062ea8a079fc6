# SPDX-License-Identifier: Apache-2.0
"""Turns: what runs next of the submitted requests.

One turn computes up to PART_TOKENS tokens of prompts (one prompt where a short one takes as long) and a part
of trajectories, then decodes: one step, or many if nothing else wants a turn. Steps beside trajectories take
about as long as the part.

  turn   1            2            3            4
  c      part         part, first  step         step          a long prompt
  a, b   step         step         step         step          running answers
  d                                part, steps  part, steps   trajectories

A request runs if its level is at least the highest priority in the batch; others wait, in the queue or with
their rows kept. The level is the priority, and rises with the time that the request has waited, so none waits
for ever. Without a free row, the request of the lowest level loses its row to one of a higher priority: it
goes back to the queue and is computed again. It loses its row once at most, but for requests far above it.

Of several shares, the one that has had least comes first (shares.py). Requests wait for those of other shares
only from the priority FIRST_CLAIM on, and not if their share is behind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

from edgellm_ros.runtime.answerer import Answerer
from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.metrics import RuntimeMetrics
from edgellm_ros.runtime.pipeline import Pipeline
from edgellm_ros.runtime.scheduling import rows
from edgellm_ros.runtime.scheduling.claims import Claims
from edgellm_ros.runtime.scheduling.encoder_thread import EncoderThread
from edgellm_ros.runtime.scheduling.entry import Clock, Entry
from edgellm_ros.runtime.scheduling.shares import (
    POLICY_TOKENS,
    Share,
    Shares,
    tokens_of_answer,
)

LOOK_S = 0.25  # longest time between two looks at the queue


class Turns:
    """The waiting and the running requests of a runtime; not thread-safe.

    - answerer: what answers; a policy answers one request at a time
    - clock: returns seconds, those of deadlines
    - others_wait: whether something happened outside that wants the next turn
    - encoder: computes the encoders' runs of newcomers beside the steps, None = this thread does

    `is_waiting`: whether the last turn had nothing to do, and encoders have a run.
    """

    def __init__(
        self,
        answerer: Answerer,
        metrics: RuntimeMetrics,
        clock: Clock,
        others_wait: Callable[[], bool] = lambda: False,
        encoder: EncoderThread | None = None,
    ) -> None:
        self.waiting: list[Entry] = []
        self._answerer = answerer
        self.is_waiting = False
        self._rows = rows.Rows(answerer, metrics, encoder) if isinstance(answerer, Pipeline) else None
        self._metrics = metrics.scheduling
        self._clock = clock
        self._others_wait = others_wait
        self._now = clock()
        self._claims = Claims(self.waiting, lambda: self.running, self._rows is None, self._now)
        self._computed: list[Entry] = []  # whose prompt has had a part in this turn
        self._behind: list[Entry] = []  # whose prompt has a part behind the last step of the turn before
        self._shares = Shares()
        self._turn = 0

    @property
    def running(self) -> list[Entry]:
        """The requests with a row."""
        return self._rows.running if self._rows is not None else []

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way, apart from waiting requests."""
        return self._rows is None or self._rows.is_idle

    def begin(self) -> None:
        """Begin after other work of the runtime: nothing runs."""
        if isinstance(self._answerer, Pipeline):
            self._answerer.clear_last_batch()

    def turn(self, admits: bool = True) -> None:
        """Take one turn; `admits`: whether waiting requests may begin."""
        self._now = self._claims.now = self._clock()
        self._computed, self._behind = self._behind, []
        shares = {entry.share for entry in (*self.waiting, *self.running)}
        self._shares.begin(shares, self._now)
        self._turn += 1
        if self._rows is not None:
            self._rows.begin_turn()
            self._rows.take_encoded()
        self._end_stopped()
        left = 0 if self._computed else rows.PART_TOKENS
        if admits:
            left = self._admit(left)
        self._encode()
        if left == rows.PART_TOKENS:
            left -= self._continue_prompt()
        if self._rows is not None:
            self._use_rows(self._rows, keeps=left > 0)
        self._count()
        self._shares.end(shares, self._clock())

    def _use_rows(self, taken: rows.Rows, keeps: bool) -> None:
        """Do the work of the rows; `keeps`: also that of next turns."""
        before, works = len(self.running), bool(self._computed)
        if keeps:
            works = taken.keep_part() or works
        taken.leave_ended(self.running)
        self._count_waits(taken)
        self._count()
        seconds = self._sample_part(taken)
        works = self._decode(taken, seconds or 0.0) or seconds is not None or works
        taken.end_turn()
        self.is_waiting = taken.encoding.is_busy and not works and len(self.running) == before

    def _encode(self) -> None:
        """Give the encoders the next run; that of a request that may not run is given up."""
        if self._rows is not None:
            newcomers = [entry for entry in self.running if entry.run is not None]
            wanted = filter(self._claims.may_run, newcomers)
            self._rows.encoding.start_next(sorted(wanted, key=self._claims.order))

    def fail_all(self, error: Exception) -> None:
        """Fail all requests; the batch is cleared."""
        waiting = list(self.waiting)
        self.waiting.clear()
        for entry in waiting:
            self._fail(entry, error)
        if self._rows is not None and not self._rows.is_idle:
            self._rows.fail_all(error)

    def _count_waits(self, taken: rows.Rows) -> None:
        """Begin or end the waiting of requests with a row."""
        for entry in self.running:
            works = entry in self._computed or entry is taken.encoding.current
            if self._claims.may_run(entry) and (entry.is_prompted or works):
                entry.go(self._now)
            else:
                entry.wait(self._now)

    def _count(self) -> None:
        self._metrics.waiting, self._metrics.running = len(self.waiting), len(self.running)

    def _end_stopped(self) -> None:
        """End waiting requests that were cancelled, or whose deadline has passed."""
        for entry in [entry for entry in self.waiting if entry.stop.is_set()]:
            sequence = entry.kept or entry.sequence
            if entry.stop.is_late and entry.kept is None:
                self.waiting.remove(entry)
                self._fail(entry, TimeoutError("the deadline passed before the request was begun"))
            elif self._rows is not None and isinstance(sequence, GenerationSequence):
                self.waiting.remove(entry)
                sequence.report("prefill", 0)
                self._rows.respond(entry, sequence)
            # a policy ends its request when it begins

    def _continue_prompt(self) -> int:
        """Compute a part of the first prompt that is not complete; return its tokens."""
        entry = self._next_prompt()
        if entry is None or self._rows is None:
            return 0
        self._computed.append(entry)
        tokens = self._rows.compute_part(entry)
        self._shares.charge(entry.share, tokens)
        return tokens

    def _next_prompt(self) -> Entry | None:
        """Return the request whose prompt is to have the next part."""
        prompts = [entry for entry in self.running if entry.prompts is not None]
        return min(filter(self._claims.may_run, prompts), key=self._claims.order, default=None)

    def _prompt_is_first(self) -> bool:
        """Return whether a prompt is not complete, and none of those that wait begins before it is."""
        first = self._next_prompt()
        order = self._claims.order
        return first is not None and all(order(first) < order(entry) for entry in self.waiting)

    def _compute_behind(self, taken: rows.Rows) -> None:
        """Compute a part of a prompt behind a step that is queued: the device need not wait for the host."""
        entry = self._next_prompt()
        tokens = taken.compute_behind(entry)
        self._behind = [] if entry is None else [entry]
        if entry is not None:
            self._shares.charge(entry.share, tokens)

    def _admit(self, tokens: int) -> int:
        """Begin waiting requests, with at most `tokens` tokens of their prompts.

        Returns the tokens left.
        """
        while tokens > 0 and (entry := self._next(tokens)) is not None:
            self.waiting.remove(entry)
            self._metrics.admitted += 1
            self._metrics.waited_seconds += entry.go(self._now)
            if self._rows is None or self._claims.is_alone(entry):
                self._answer_alone(entry)
                return 0
            self._computed.append(entry)
            self._shares.charge(entry.share, computed := self._rows.begin(entry))
            tokens -= self._rows.cost_of(computed)
        return tokens

    def _next(self, tokens: int) -> Entry | None:
        """Return the waiting request that begins next; None if none may begin.

        Of each share only the first request may, and none before one that waits for an empty batch, or for a
        turn with room for more than `tokens` tokens of prompts.
        """
        looked: set[Share] = set()
        for entry in sorted(self.waiting, key=self._claims.order):
            if entry.share in looked:
                continue
            if not self._fits(entry, tokens):
                return None
            if self._may_begin(entry):
                return entry
            if self._claims.is_alone(entry):
                return None
            looked.add(entry.share)
        return None

    def _fits(self, entry: Entry, tokens: int) -> bool:
        """Return whether the first part of a prompt has at most `tokens` tokens."""
        sequence = entry.sequence
        if not isinstance(sequence, GenerationSequence):
            return True
        return min(len(sequence.token_ids), rows.PART_TOKENS) <= tokens

    def _may_begin(self, entry: Entry) -> bool:
        """Return whether a request may begin now, if need be in the row of another."""
        if self._claims.is_alone(entry):
            return self._clear(entry)
        if not self._claims.may_run(entry):
            return False
        first = self._next_prompt()
        if first is not None and self._claims.order(first) < self._claims.order(entry):
            return False
        return self._rows is not None and (self._rows.are_free or self._make_room(entry, self._rows))

    def _make_room(self, entry: Entry, taken: rows.Rows) -> bool:
        """Take the row of a request with a lower claim, which is computed again later."""
        lower = [other for other in self.running if self._claims.gives_way(other, entry)]
        if not lower:
            return False
        self._displace(max(lower, key=self._claims.order), taken)
        return taken.are_free

    def _clear(self, entry: Entry) -> bool:
        """Take all rows for a request that runs alone, if those that have them give way."""
        if self._rows is not None and all(self._claims.gives_way(other, entry) for other in self.running):
            for other in list(self.running):
                self._displace(other, self._rows)
        return self.is_idle

    def _displace(self, loser: Entry, taken: rows.Rows) -> None:
        taken.displace(loser, self._now)
        if not loser.handle.done:
            self.waiting.append(loser)

    def _charge_answer(self, entry: Entry) -> None:
        """Charge what an answer has grown by.

        What is computed again after the loss of a row is free.
        """
        assert isinstance(self._answerer, Pipeline)
        action = self._answerer.action
        tokens = tokens_of_answer(entry.sequence, action.default_steps if action is not None else 0)
        if tokens > entry.counted:
            self._shares.charge(entry.share, tokens - entry.counted)
            entry.counted = tokens

    def _answer_alone(self, entry: Entry) -> None:
        if self._rows is not None:
            self._rows.encoding.wait()
        try:
            response = self._answerer.answer_one(entry.sequence)
        except Exception as error:
            self._fail(entry, error)
            return
        if isinstance(entry.sequence, GenerationSequence):
            self._shares.charge(entry.share, response.prompt_tokens - response.reused_tokens)
            self._charge_answer(entry)
        else:
            self._shares.charge(entry.share, POLICY_TOKENS)
        entry.finish(dataclasses.replace(response, metrics=entry.seconds(response.metrics)))
        self._metrics.finished += 1

    def _sample_part(self, taken: rows.Rows) -> float | None:
        """Sample a part of the trajectories of one request; return the seconds.

        Requests take turns, whatever their share. None if no request wants a part.
        """
        ready = [entry for entry in self.running if entry.sequence.wants_part]
        ready = list(filter(self._claims.may_run, ready))
        if not ready:
            return None
        entry = min(ready, key=lambda one: (one.sampled, one.number))
        entry.sampled = self._turn
        start = self._clock()
        taken.sample_part(entry)
        return self._clock() - start

    def _decode(self, taken: rows.Rows, sampled: float) -> bool:
        """Decode the requests that may run, until something else may want a turn.

        sampled: seconds that a part of trajectories has taken in this turn. Returns whether any may run.
        """
        running = list(filter(self._claims.may_run, self.running))
        answering = [entry for entry in running if entry.is_prompted and entry.sequence.decoding]
        going = [entry for entry in answering if not entry.has_one_token]
        waits = len(going) < len(self.running) or bool(self.waiting)
        prompts = any(entry.prompts is not None for entry in self.running)
        keeps = taken.next_turn is not None
        samples = any(entry.sequence.wants_part for entry in running)
        behind = taken.computes_behind and self._prompt_is_first() and not (keeps or samples)
        until = self._clock() + (sampled if samples else LOOK_S)

        def interrupted() -> bool:
            if keeps or (prompts and not behind) or taken.wants_turn or self._others_wait():
                return True
            return waits and self._clock() >= until

        taken.decode(going, interrupted, partial(self._compute_behind, taken) if behind else None)
        for entry in going:
            self._charge_answer(entry)
        return bool(going)

    def _fail(self, entry: Entry, error: Exception) -> None:
        entry.fail(error)
        self._metrics.failed += 1
