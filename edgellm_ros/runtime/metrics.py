# SPDX-License-Identifier: Apache-2.0
"""Counters of the runtime, cumulative since it was made. Times in seconds of wall clock."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LLMPrefillMetrics:
    """Prompt tokens taken from a saved cache (`reused_tokens`) and computed, in `total_runs` runs."""

    reused_tokens: int = 0
    computed_tokens: int = 0
    total_runs: int = 0
    seconds: float = 0.0


@dataclass
class LLMGenerationMetrics:
    """Tokens generated for all sequences (first tokens included), over `total_runs` decode steps."""

    generated_tokens: int = 0
    total_runs: int = 0
    seconds: float = 0.0


@dataclass
class MultimodalMetrics:
    """Images encoded and the rows that they became."""

    total_images: int = 0
    total_image_tokens: int = 0
    seconds: float = 0.0


@dataclass
class ActionMetrics:
    """Trajectories sampled, over `total_runs` Euler steps."""

    trajectories: int = 0
    total_runs: int = 0
    seconds: float = 0.0
