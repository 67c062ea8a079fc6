# SPDX-License-Identifier: Apache-2.0
"""Shares with confidence intervals, and percentiles."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Z = 1.959963984540054  # of the standard normal distribution: 95% are between -Z and Z


@dataclass(frozen=True)
class Share:
    """A number of successes among trials."""

    count: int
    of: int

    @property
    def value(self) -> float | None:
        """Return the share; None without trials."""
        return self.count / self.of if self.of else None

    @property
    def interval(self) -> tuple[float, float]:
        """Compute the 95% confidence interval of the probability by Wilson's score.

        Unlike the normal approximation the interval stays inside 0 to 1 and has a width at 0 and at 1
        (E. B. Wilson, 1927). (0, 1) without trials.
        """
        if not self.of:
            return 0.0, 1.0
        share, spread = self.count / self.of, Z * Z / self.of
        middle = (share + spread / 2) / (1 + spread)
        half = Z / (1 + spread) * math.sqrt(share * (1 - share) / self.of + spread / (4 * self.of))
        # exact ends where rounding would leave them by 1e-17
        low = 0.0 if self.count == 0 else middle - half
        high = 1.0 if self.count == self.of else middle + half
        return low, high

    def to_json(self) -> dict[str, Any]:
        """Return the share as JSON types."""
        low, high = self.interval
        return {"count": self.count, "of": self.of, "share": self.value, "low": low, "high": high}

    def __str__(self) -> str:
        if not self.of:
            return "0 of 0"
        low, high = (f"{100 * end:.1f}" for end in self.interval)
        return f"{self.count} of {self.of} ({100 * self.count / self.of:.1f}%, {low} to {high}%)"


def percentile(ordered: Sequence[float], percent: int) -> float:
    """Return the value that `percent` of sorted values do not exceed (nearest rank)."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def spread_of(values: Iterable[float]) -> dict[str, float] | None:
    """Return median, 90th and 99th percentile and maximum; None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    named = {f"p{percent}": percentile(ordered, percent) for percent in (50, 90, 99)}
    return {"median": named["p50"], "p90": named["p90"], "p99": named["p99"], "max": ordered[-1]}
