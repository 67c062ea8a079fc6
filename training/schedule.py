# SPDX-License-Identifier: Apache-2.0
"""Learning rates over a time budget."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Learning rate over a time budget: linear warm-up, then cosine to 1% of the peak."""

    peak: float
    warmup_steps: int = 300

    def rate(self, step: int, progress: float) -> float:
        """Return the rate at `step` after a share `progress` in [0, 1] of the time."""
        cosine = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
        return self.peak * min(1.0, (step + 1) / self.warmup_steps) * cosine
