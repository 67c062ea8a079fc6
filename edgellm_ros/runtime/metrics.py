# SPDX-License-Identifier: Apache-2.0
"""Counters of a runtime since its opening; times are wall-clock seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

BEFORE_FIRST_TOKEN = ("tokenize_s", "vision_s", "audio_s", "prefill_s")


@dataclass
class LLMPrefillMetrics:
    """Counters of prefills."""

    reused_tokens: int = 0  # prompt tokens whose KV rows came from the prefix cache
    computed_tokens: int = 0  # prompt tokens that the engine computed
    total_runs: int = 0  # prefilled batches
    seconds: float = 0.0


@dataclass
class LLMGenerationMetrics:
    """Counters of decode steps."""

    generated_tokens: int = 0  # of all finished answers, the first tokens from the prefill included
    total_runs: int = 0  # decode steps
    seconds: float = 0.0


@dataclass
class SpecDecodeGenerationMetrics:
    """Counters of speculative decoding; all 0 while it is off."""

    strategy: str = ""  # "eagle" or "lookup"; "" = off
    total_runs: int = 0  # verifications of a batch
    verified_trees: int = 0  # one per run and sequence
    generated_tokens: int = 0  # of all verifications
    vanilla_runs: int = 0  # decode steps without a draft
    # time of each part of a round, on devices that work while they are called (CPU); 0 on others
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    accept_seconds: float = 0.0

    @property
    def tokens_per_verification(self) -> float:
        """Mean number of tokens that a verification yields for a sequence; 0 without one."""
        return self.generated_tokens / self.verified_trees if self.verified_trees else 0.0


@dataclass
class MultimodalMetrics:
    """Counters of the vision and audio encoders."""

    total_images: int = 0
    total_frame_groups: int = 0  # groups of video frames, two frames each in published models
    total_image_tokens: int = 0  # rows of embeddings that the images and videos became
    total_sounds: int = 0
    total_audio_tokens: int = 0  # rows of embeddings that the sounds became
    seconds: float = 0.0  # of both encoders


@dataclass
class ActionMetrics:
    """Counters of the action head."""

    trajectories: int = 0  # sampled trajectories
    total_runs: int = 0  # Euler steps
    seconds: float = 0.0


@dataclass
class RuntimeMetrics:
    """All counters of one runtime."""

    prefill: LLMPrefillMetrics = field(default_factory=LLMPrefillMetrics)
    generation: LLMGenerationMetrics = field(default_factory=LLMGenerationMetrics)
    spec_decode: SpecDecodeGenerationMetrics = field(default_factory=SpecDecodeGenerationMetrics)
    multimodal: MultimodalMetrics = field(default_factory=MultimodalMetrics)
    action: ActionMetrics = field(default_factory=ActionMetrics)


class StageClock:
    """Seconds per stage of one batch; each stage begins where the previous one ended.

    `finish` waits for the work that a stage has queued, so that the stage's time includes it.
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish
        self._start = self._last = time.perf_counter()
        self._stages = dict.fromkeys((*BEFORE_FIRST_TOKEN, "decode_s", "action_s", "keep_s"), 0.0)

    def end(self, stage: str) -> float:
        """End a stage when its work is complete; return the seconds since the last end.

        The seconds of a stage that occurs several times add up. EngineError if some of the work failed.
        """
        self._finish()
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self._stages[stage] += seconds
        return seconds

    def metrics(self) -> dict[str, float]:
        """Return the seconds of every stage, up to the first token, and in total."""
        first_token = sum(self._stages[stage] for stage in BEFORE_FIRST_TOKEN)
        return {**self._stages, "first_token_s": first_token, "total_s": self._last - self._start}
