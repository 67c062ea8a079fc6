# SPDX-License-Identifier: Apache-2.0
"""Claims: which submitted requests come first, and which wait for others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgellm_ros.runtime.scheduling.entry import Entry
from edgellm_ros.runtime.scheduling.shares import FIRST_CLAIM

FAR_ABOVE = 50  # levels: a request that is so far above another takes its row again and again


class Claims:
    """The claims of requests on steps and rows, at the time `now` of the clock.

    - waiting, running: requests in the queue, and those with a row
    - one_at_a_time: whether each request runs alone
    """

    def __init__(
        self,
        waiting: Sequence[Entry],
        running: Callable[[], Sequence[Entry]],
        one_at_a_time: bool,
        now: float,
    ) -> None:
        self._waiting = waiting
        self._running = running
        self._one_at_a_time = one_at_a_time
        self.now = now

    def is_alone(self, entry: Entry) -> bool:
        """Return whether a request cannot join a batch: guidance needs a second row."""
        return self._one_at_a_time or entry.request.guidance is not None

    def may_run(self, entry: Entry) -> bool:
        """Return whether a request may run beside those in the batch."""
        return not any(self._waits_for(entry, other) for other in self._running())

    def pauses_all(self, entry: Entry) -> bool:
        """Return whether all requests in the batch wait while this one has a row."""
        return all(self._waits_for(other, entry) for other in self._running())

    def next_prompt(self) -> Entry | None:
        """Return whose prompt is to have the next part; None = all are complete."""
        prompts = [entry for entry in self._running() if entry.prompts is not None]
        return min(filter(self.may_run, prompts), key=self.order, default=None)

    def order(self, entry: Entry) -> tuple[int, float, int, int]:
        """Return a key that is lowest for the request that comes first.

        Beside requests that must be alone, such as those to a policy, the first claim of a share has a limit.
        """
        level, share = entry.level(self.now), entry.share
        claims = level >= FIRST_CLAIM and not any(
            self.is_alone(other) and other.share.is_behind(share) for other in self._waiting
        )
        return -level if claims else 0, share.used, -level, entry.number

    def gives_way(self, other: Entry, entry: Entry) -> bool:
        """Return whether a request with a row loses it to another one, if need be."""
        if entry.share is other.share or entry.priority >= FIRST_CLAIM:
            above = entry.priority - other.level(self.now)
            return above > (0 if other.kept is None else FAR_ABOVE)
        return other.kept is None and other.priority < FIRST_CLAIM and entry.share.is_behind(other.share)

    def _waits_for(self, entry: Entry, other: Entry) -> bool:
        """Return whether a request waits while another one has a row."""
        if entry.level(self.now) >= other.priority:
            return False
        if entry.share is other.share:
            return True
        return other.priority >= FIRST_CLAIM and not entry.share.is_behind(other.share)
