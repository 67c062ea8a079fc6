# SPDX-License-Identifier: Apache-2.0
"""Counters of a runtime since its opening.

Seconds are those of requests that were answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from edgellm_ros.engine.device import Mark

BEFORE_FIRST_TOKEN = ("tokenize_s", "vision_s", "audio_s", "prefill_s")
STAGES = (*BEFORE_FIRST_TOKEN, "decode_s", "action_s", "keep_s")
NO_SECONDS: Mapping[str, float] = dict.fromkeys((*STAGES, "first_token_s", "total_s"), 0.0)


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

    strategy: str = ""  # "eagle", "mtp", "dflash" or "lookup"; "" = off
    total_runs: int = 0  # verifications of a batch
    verified_trees: int = 0  # one per run and sequence
    generated_tokens: int = 0  # of all verifications
    vanilla_runs: int = 0  # decode steps without a draft
    # of `timed_runs` rounds: all on a CPU, on a GPU those that `LLMInferenceRuntime.measure_rounds` asks for
    timed_runs: int = 0
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
    total_audio_tokens: int = 0  # rows of embeddings that these sounds became, without rows kept
    seconds: float = 0.0  # of both encoders


@dataclass
class ActionMetrics:
    """Counters of the action head."""

    trajectories: int = 0  # sampled trajectories
    total_runs: int = 0  # Euler steps
    seconds: float = 0.0


@dataclass
class SchedulingMetrics:
    """Counters of submitted requests, and how many there are now."""

    waiting: int = 0  # now in the queue
    running: int = 0  # now in the batch
    admitted: int = 0  # to the batch; more than once if its row was needed
    paused: int = 0  # times that a request had to wait for one of a higher priority, with its row kept
    displaced: int = 0  # times that a request lost its row to one of a higher priority, to be computed again
    finished: int = 0  # with a response, cancelled ones included
    failed: int = 0  # with an error
    waited_seconds: float = 0.0  # in the queue, of all admissions


@dataclass
class RuntimeMetrics:
    """All counters of one runtime."""

    prefill: LLMPrefillMetrics = field(default_factory=LLMPrefillMetrics)
    generation: LLMGenerationMetrics = field(default_factory=LLMGenerationMetrics)
    spec_decode: SpecDecodeGenerationMetrics = field(default_factory=SpecDecodeGenerationMetrics)
    multimodal: MultimodalMetrics = field(default_factory=MultimodalMetrics)
    action: ActionMetrics = field(default_factory=ActionMetrics)
    scheduling: SchedulingMetrics = field(default_factory=SchedulingMetrics)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore all counters after the block."""
        before = {name: replace(counters) for name, counters in vars(self).items()}
        try:
            yield
        finally:
            for name, counters in before.items():
                vars(getattr(self, name)).update(vars(counters))  # others hold the object

    def add_seconds(self, stages: Mapping[str, float]) -> None:
        """Add the seconds of a batch's stages, which `StageClock.metrics` returned."""
        self.multimodal.seconds += stages["vision_s"] + stages["audio_s"]
        self.prefill.seconds += stages["prefill_s"]
        self.generation.seconds += stages["decode_s"]
        self.action.seconds += stages["action_s"]


class Clock(Protocol):
    """What measures stages."""

    def end(self, stage: str) -> None:
        """End a stage after the work queued so far."""


class StageClock:
    """Seconds per stage of one batch; each stage begins where the previous one ended.

    A stage ends when the device has done its work. The host does not wait for it: `mark` queues a mark after
    the stage's work, and the marks' times are read at the end.
    """

    def __init__(self, mark: Callable[[], Mark]) -> None:
        self._mark = mark
        self._start = mark()
        self._ends: list[tuple[str, Mark]] = []

    def end(self, stage: str, mark: Mark | None = None) -> None:
        """End a stage after the work queued so far, or at a mark.

        The seconds of a stage that occurs several times add up.
        """
        end = (stage, self._mark() if mark is None else mark)
        if self._ends and self._ends[-1][0] == stage:
            self._ends[-1] = end
        else:
            self._ends.append(end)

    def metrics(self) -> dict[str, float]:
        """Wait for all stages; return their seconds, up to the first token and in total.

        EngineError if some of the work failed.
        """
        stages = dict.fromkeys(STAGES, 0.0)
        last = self._ends[-1][1] if self._ends else self._start
        total = last.seconds_since(self._start)  # waits once for all marks
        last = self._start
        for stage, end in self._ends:
            stages[stage] += end.seconds_since(last)
            last = end
        first_token = sum(stages[stage] for stage in BEFORE_FIRST_TOKEN)
        return {**stages, "first_token_s": first_token, "total_s": total}
