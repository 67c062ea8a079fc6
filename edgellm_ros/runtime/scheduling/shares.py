# SPDX-License-Identifier: Apache-2.0
"""Shares: how several clients of a runtime divide its work.

Each share has a counter: the tokens computed for its requests, divided by its weight. Requests of the share
with the lowest counter come first (start-time fair queuing, Goyal et al., 1996). Priorities order requests
of one share; from FIRST_CLAIM on they have the first claim on all shares.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from edgellm_ros.runtime.batch.sequence import GenerationSequence

FIRST_CLAIM = 100  # lowest priority that comes before requests of other shares
# tokens by which a share must be behind another one to take its rows, or to run beside FIRST_CLAIM
BEHIND = 1024
MOST_BEHIND = 2048  # tokens that a share is behind at most
IDLE_S = 1.0  # seconds without a request after which a share is not behind any more
MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0
POLICY_TOKENS = 256  # that a request to a policy counts


@dataclass(eq=False)
class Share:
    """One client's share of a runtime."""

    weight: float = 1.0  # its part of the work is proportional to it
    tokens: int = 0  # computed for its requests; Euler steps of trajectories count as tokens
    lost_device: bool = False  # whether a request has failed because the device was lost
    used: float = 0.0  # the counter: tokens / weight, raised after idle times
    _seen: float = field(default=float("-inf"), repr=False)  # when it last had a request, in seconds

    def is_behind(self, other: Share) -> bool:
        """Whether the share has had clearly less than another one."""
        return other.used - self.used > BEHIND


class Shares:
    """The counters of all shares."""

    def __init__(self) -> None:
        self._most = 0.0  # of all counters

    def begin(self, shares: Iterable[Share], now: float) -> None:
        """Begin a turn in which these shares have requests; `now` in seconds."""
        for share in shares:
            kept = MOST_BEHIND if now <= share._seen + IDLE_S else 0
            share.used = max(share.used, self._most - kept)

    def end(self, shares: Iterable[Share], now: float) -> None:
        """End a turn that `begin` has begun."""
        for share in shares:
            share._seen = now

    def charge(self, share: Share, tokens: int) -> None:
        """Count tokens that were computed for a share."""
        share.tokens += tokens
        share.used += tokens / share.weight
        self._most = max(self._most, share.used)


def tokens_of_answer(sequence: GenerationSequence, default_steps: int) -> int:
    """Return the tokens of an answer, and the Euler steps of its trajectories.

    `default_steps`: of requests that give no number.
    """
    request, steps = sequence.request, 0
    if sequence.wants_actions_now:
        steps = request.action_samples * (request.denoise_steps or default_steps)
    return len(sequence.generated) + steps
