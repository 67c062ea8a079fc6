# SPDX-License-Identifier: Apache-2.0
"""How fast something grows that also wavers: a line that single outliers and steps do not turn."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def growth_rate(progress: Sequence[float], sizes: Sequence[float], period: int) -> float:
    """How much `sizes` grow for each unit of `progress`, two readings of which belong together.

    Readings recur with `period`, so that medians are taken over whole periods (an incomplete one at the
    beginning is left out); the median of the slopes between every two of them is the rate (Theil-Sen).
    ValueError for less than two periods and where `progress` stands still.
    """
    periods = len(sizes) // period
    if len(progress) != len(sizes) or periods < 2:
        raise ValueError(
            f"expected two sequences of at least {2 * period}, got {len(progress)} and {len(sizes)}"
        )
    first = len(sizes) - periods * period
    points = [
        (
            statistics.median(progress[start : start + period]),
            statistics.median(sizes[start : start + period]),
        )
        for start in range(first, len(sizes), period)
    ]
    slopes = [
        (later - earlier) / (end - begin)
        for index, (begin, earlier) in enumerate(points)
        for end, later in points[index + 1 :]
        if end > begin
    ]
    if not slopes:
        raise ValueError(f"progress stands still at {points[0][0]}")
    return statistics.median(slopes)
