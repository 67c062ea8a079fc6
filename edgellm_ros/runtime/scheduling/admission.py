# SPDX-License-Identifier: Apache-2.0
"""Admission: which waiting requests begin, and in whose rows."""

from __future__ import annotations

from collections.abc import Callable

from edgellm_ros.runtime.batch.sequence import GenerationSequence
from edgellm_ros.runtime.metrics import SchedulingMetrics
from edgellm_ros.runtime.scheduling import rows
from edgellm_ros.runtime.scheduling.claims import Claims
from edgellm_ros.runtime.scheduling.entry import Entry
from edgellm_ros.runtime.scheduling.shares import Share, Shares


class Admission:
    """Takes requests from the queue `waiting`.

    - taken: the rows; None = each request runs alone
    - answer_alone: answers a request that does
    """

    def __init__(
        self,
        waiting: list[Entry],
        taken: rows.Rows | None,
        claims: Claims,
        shares: Shares,
        metrics: SchedulingMetrics,
        answer_alone: Callable[[Entry], None],
    ) -> None:
        self._waiting = waiting
        self._rows = taken
        self._claims = claims
        self._shares = shares
        self._metrics = metrics
        self._answer_alone = answer_alone

    @property
    def next_pauses_all(self) -> bool:
        """Whether all with a row wait while the first waiting request has one."""
        entry = min(self._waiting, key=self._claims.order, default=None)
        return entry is not None and self._claims.pauses_all(entry)

    def begin(self, tokens: int) -> tuple[int, list[Entry]]:
        """Begin waiting requests, with at most `tokens` tokens of their prompts.

        Returns the tokens left, and the requests that have a row.
        """
        begun: list[Entry] = []
        while tokens > 0 and (entry := self._next(tokens)) is not None:
            self.take(entry)
            if self._rows is None or self._claims.is_alone(entry):
                self._answer_alone(entry)
                return 0, begun
            begun.append(entry)
            self._shares.charge(entry.share, computed := self._rows.begin(entry))
            tokens -= self._rows.cost_of(computed)
        return tokens, begun

    def first_behind(self) -> Entry | None:
        """Return the first waiting request; None if it may not begin behind a step.

        A request may in a free row, if no other one moves, and if no incomplete prompt comes before it.
        """
        entry = min(self._waiting, key=self._claims.order, default=None)
        if entry is None or self._rows is None or self._claims.is_alone(entry):
            return None
        begins = self._claims.may_run(entry) and not self._waits_for_prompt(entry)
        return entry if begins and self._rows.may_begin_behind(entry) else None

    def take(self, entry: Entry) -> None:
        """Take a request from the queue, to begin it."""
        self._waiting.remove(entry)
        self._metrics.admitted += 1
        self._metrics.waited_seconds += entry.go(self._claims.now)

    def _next(self, tokens: int) -> Entry | None:
        """Return the waiting request that begins next; None if none may begin.

        Of each share only the first request may, and none before one that waits for an empty batch, or for a
        turn with room for more than `tokens` tokens of prompts.
        """
        looked: set[Share] = set()
        for entry in sorted(self._waiting, key=self._claims.order):
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
        if not self._claims.may_run(entry) or self._waits_for_prompt(entry):
            return False
        return self._rows is not None and (self._rows.are_free or self._make_room(entry, self._rows))

    def _waits_for_prompt(self, entry: Entry) -> bool:
        """Return whether a prompt is not complete that comes before the request's."""
        prompt = self._claims.next_prompt()
        return prompt is not None and self._claims.order(prompt) < self._claims.order(entry)

    def _make_room(self, entry: Entry, taken: rows.Rows) -> bool:
        """Take the row of a request with a lower claim, which is computed again later."""
        lower = [other for other in taken.running if self._claims.gives_way(other, entry)]
        if not lower:
            return False
        self._displace(max(lower, key=self._claims.order), taken)
        return taken.are_free

    def _clear(self, entry: Entry) -> bool:
        """Take all rows for a request that runs alone, if those that have them give way."""
        taken = self._rows
        if taken is None:
            return True
        if all(self._claims.gives_way(other, entry) for other in taken.running):
            for other in list(taken.running):
                self._displace(other, taken)
        return taken.is_idle

    def _displace(self, loser: Entry, taken: rows.Rows) -> None:
        taken.displace(loser, self._claims.now)
        if not loser.handle.done:
            self._waiting.append(loser)
