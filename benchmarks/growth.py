# SPDX-License-Identifier: Apache-2.0
"""Growth rate of a noisy series, robust against single outliers and steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def growth_rate(progress: Sequence[float], sizes: Sequence[float], period: int) -> float:
    """Estimate the growth of `sizes` per unit of `progress`.

    The readings of the two sequences belong together and recur with `period`. Medians are taken over whole
    periods; an incomplete period at the beginning is left out. The rate is the median of the slopes between
    every two medians (Theil-Sen). ValueError for less than two periods, or if `progress` does not change.
    """
    periods = len(sizes) // period
    if len(progress) != len(sizes) or periods < 2:
        raise ValueError(
            f"expected two sequences of the same length, at least {2 * period}, got {len(progress)} and "
            f"{len(sizes)}"
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
        raise ValueError(f"expected rising progress, got {points[0][0]} in all periods")
    return statistics.median(slopes)
