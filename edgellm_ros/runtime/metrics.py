# SPDX-License-Identifier: Apache-2.0
"""Counters of the runtime, cumulative since it was made. Times in seconds of wall clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

BEFORE_FIRST_TOKEN = ("tokenize_s", "vision_s", "audio_s", "prefill_s")


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
    """Images and sounds encoded and the rows that they became."""

    total_images: int = 0
    total_image_tokens: int = 0
    total_sounds: int = 0
    total_audio_tokens: int = 0
    seconds: float = 0.0


@dataclass
class ActionMetrics:
    """Trajectories sampled, over `total_runs` Euler steps."""

    trajectories: int = 0
    total_runs: int = 0
    seconds: float = 0.0


@dataclass
class RuntimeMetrics:
    """All counters of one runtime."""

    prefill: LLMPrefillMetrics = field(default_factory=LLMPrefillMetrics)
    generation: LLMGenerationMetrics = field(default_factory=LLMGenerationMetrics)
    multimodal: MultimodalMetrics = field(default_factory=MultimodalMetrics)
    action: ActionMetrics = field(default_factory=ActionMetrics)


class StageClock:
    """Seconds per stage of one batch; each stage begins where the one before it ended.

    `finish` waits for what a stage has queued, so that its time is its own.
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish
        self._start = self._last = time.perf_counter()
        self._stages = dict.fromkeys((*BEFORE_FIRST_TOKEN, "decode_s", "action_s", "keep_s"), 0.0)

    def end(self, stage: str) -> float:
        """End a stage when its work is done; return the seconds since the last end.

        A stage may come several times: its seconds add up. EngineError if some of the work failed.
        """
        self._finish()
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self._stages[stage] += seconds
        return seconds

    def metrics(self) -> dict[str, float]:
        """Every stage, from the request to the first token, and the whole."""
        first_token = sum(self._stages[stage] for stage in BEFORE_FIRST_TOKEN)
        return {**self._stages, "first_token_s": first_token, "total_s": self._last - self._start}
