# SPDX-License-Identifier: Apache-2.0
"""Turns: what runs next of the submitted requests.

One turn computes up to PART_TOKENS tokens of prompts (one prompt where a short one takes as long) and a part
of trajectories, then decodes: one step, or many if nothing else wants a turn. Steps beside trajectories take
about as long as the part.

  turn   1            2            3            4
  c      part         part, first  step         step          a long prompt
  a, b   step         step         step         step          running answers
  d                                part, steps  part, steps   trajectories

Where the device works while the host goes on, requests begin behind a step that is queued, and so do parts of
prompts; a turn has many of these steps.

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
from edgellm_ros.runtime.scheduling.admission import Admission
from edgellm_ros.runtime.scheduling.claims import Claims
from edgellm_ros.runtime.scheduling.encoder_thread import EncoderThread
from edgellm_ros.runtime.scheduling.entry import Clock, Entry
from edgellm_ros.runtime.scheduling.shares import POLICY_TOKENS, Shares, tokens_of_answer

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
        self._admission = Admission(
            self.waiting, self._rows, self._claims, self._shares, self._metrics, self._answer_alone
        )
        self._has_missed = False  # whether a request that was to begin behind a step has not begun
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
        behind = admits and self._begins_behind()
        left = 0 if behind or self._computed else rows.PART_TOKENS
        if admits and not behind and (left or self._admission.next_pauses_all):
            rest, begun = self._admission.begin(rows.PART_TOKENS)
            left = min(left, rest)
            self._computed += begun
        self._encode()
        if left == rows.PART_TOKENS:
            left -= self._continue_prompt()
        if self._rows is not None:
            self._use_rows(self._rows, keeps=left > 0, admits=admits)
        self._has_missed = behind and not self._behind
        self._count()
        self._shares.end(shares, self._clock())

    def _use_rows(self, taken: rows.Rows, keeps: bool, admits: bool) -> None:
        """Do the work of the rows.

        keeps: also that of next turns; admits: whether requests may begin behind steps.
        """
        before, works = len(self.running), bool(self._computed)
        if keeps:
            works = taken.keep_part() or works
        taken.leave_ended(self.running)
        self._count_waits(taken)
        self._count()
        seconds = self._sample_part(taken)
        works = self._decode(taken, seconds or 0.0, admits) or seconds is not None or works
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
        entry = self._claims.next_prompt()
        if entry is None or self._rows is None:
            return 0
        self._computed.append(entry)
        tokens = self._rows.compute_part(entry)
        self._shares.charge(entry.share, tokens)
        return tokens

    def _prompt_is_first(self) -> bool:
        """Return whether none of those that wait begins before a prompt is complete."""
        first, order = self._claims.next_prompt(), self._claims.order
        return first is not None and all(order(first) < order(entry) for entry in self.waiting)

    def _begins_behind(self) -> bool:
        """Return whether the next request begins behind a step of this turn."""
        if self._rows is None or not self._rows.computes_behind or self._has_missed:
            return False
        stepping = self._stepping()
        masks = any(entry.sequence.grammar is not None for entry in stepping)  # of them the host waits for
        return bool(stepping) and not masks and self._admission.first_behind() is not None

    def _work_behind(self, taken: rows.Rows, admits: bool) -> None:
        """Begin a request, or compute a part of a prompt, behind a step that is queued.

        So the device need not wait for the host.
        """
        entry = self._admission.first_behind() if admits else None
        if entry is not None:
            self._admission.take(entry)
        else:
            entry = self._claims.next_prompt()
        self._behind = [] if entry is None else [entry]
        tokens = taken.work_behind(entry)
        if entry is not None:
            self._shares.charge(entry.share, tokens)

    def _stepping(self) -> list[Entry]:
        """Return the requests of the next step."""
        answering = [entry for entry in self.running if entry.is_prompted and entry.sequence.decoding]
        return [entry for entry in answering if not entry.has_one_token and self._claims.may_run(entry)]

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

    def _decode(self, taken: rows.Rows, sampled: float, admits: bool) -> bool:
        """Decode the requests that may run, until something else may want a turn.

        - sampled: seconds that a part of trajectories has taken in this turn
        - admits: whether requests may begin behind steps

        Returns whether any may run.
        """
        going = self._stepping()
        waits = len(going) < len(self.running) or bool(self.waiting)
        prompts = any(entry.prompts is not None for entry in self.running)
        keeps = taken.next_turn is not None
        samples = any(entry.sequence.wants_part and self._claims.may_run(entry) for entry in self.running)
        behind = taken.computes_behind and not (keeps or samples)
        behind = behind and (
            self._prompt_is_first() or (admits and self._admission.first_behind() is not None)
        )
        until = self._clock() + (sampled if samples else LOOK_S)

        def interrupted() -> bool:
            if keeps or (prompts and not behind) or taken.wants_turn or self._others_wait():
                return True
            return waits and self._clock() >= until

        taken.decode(going, interrupted, partial(self._work_behind, taken, admits) if behind else None)
        for entry in going:
            self._charge_answer(entry)
        return bool(going)

    def _fail(self, entry: Entry, error: Exception) -> None:
        entry.fail(error)
        self._metrics.failed += 1
