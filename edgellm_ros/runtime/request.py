# SPDX-License-Identifier: Apache-2.0
"""What goes into the runtime and what comes out."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edgellm_ros.echo import quoted
from edgellm_ros.kernels.random import MAX_SEED
from edgellm_ros.multimodal.sound import Sound

MAX_LOGPROBS = 50
MAX_DENOISE_STEPS = 1000


def _check_integer(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not low <= value <= high:
        raise ValueError(f"{name} must be an integer from {low} to {high}, got {quoted(value)}")


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float, np.number))
        or not low <= value <= high
        or value == math.inf
    ):
        expected = (
            f"number from {low:g} to {high:g}" if high < math.inf else f"finite number of at least {low:g}"
        )
        raise ValueError(f"{name} must be a {expected}, got {quoted(value)}")


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when to stop.

    temperature 0 takes the most likely token; top_k 0, top_p 1, min_p 0 and repetition_penalty 1 do nothing.
    `stop` strings end the answer and are not part of its text. The same seed gives the same tokens.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 96
    stop: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        _check_range("temperature", self.temperature, 0.0, math.inf)
        _check_range("top_p", self.top_p, 0.0, 1.0)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, math.inf)
        if self.top_p == 0 or self.repetition_penalty == 0:
            raise ValueError("top_p and repetition_penalty must be greater than 0")
        _check_integer("top_k", self.top_k, 0, 2**31 - 1)
        _check_integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_integer("seed", self.seed, 0, MAX_SEED)
        if isinstance(self.stop, str) or not all(isinstance(stop, str) and stop for stop in self.stop):
            raise ValueError(f"stop must be a sequence of non-empty strings, got {quoted(self.stop)}")
        object.__setattr__(self, "stop", tuple(self.stop))


@dataclass(frozen=True)
class Progress:
    """Where a request stands.

    stage: "vision", "audio", "prefill", "decode" or "action"; step counts within the stage. `text` is the
    answer so far: complete characters only, and nothing that might become part of a stop string.
    """

    stage: str
    text: str
    tokens: int
    step: int


@dataclass(frozen=True, eq=False)
class LLMGenerationRequest:
    """One question to the model.

    images: uint8 arrays [H, W, 3], RGB. audio: recordings; in the prompt they stand before the text, which
    may be empty. history: past poses (x, y[, heading]) in metres and radians in the robot's present frame,
    oldest first; None = stood still. speed: m/s now; None = from the history. lora: the adapter to answer
    with, "" = the active one, "base" = the base model. logprobs: how many of the most likely tokens to report
    per token. action_samples: how many trajectories; noise_seed None = the runtime's; denoise_steps None =
    the checkpoint's. `on_progress` is called from the thread that handles the request; `cancel`, once set,
    ends it at the next token or Euler step.
    """

    prompt: str
    system_prompt: str = ""
    images: tuple[np.ndarray, ...] = ()
    audio: tuple[Sound, ...] = ()
    history: np.ndarray | None = None
    speed: float | None = None
    lora: str = ""
    sampling: SamplingParams = SamplingParams()
    logprobs: int = 0
    action_samples: int = 0
    noise_seed: int | None = None
    denoise_steps: int | None = None
    on_progress: Callable[[Progress], None] | None = None
    cancel: threading.Event | None = None

    def __post_init__(self) -> None:
        for name in ("prompt", "system_prompt", "lora"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be a string, got {quoted(getattr(self, name))}")
        object.__setattr__(self, "images", tuple(self.images))
        object.__setattr__(self, "audio", tuple(self.audio))
        _check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _check_integer("action_samples", self.action_samples, 0, 2**31 - 1)
        if self.noise_seed is not None:
            _check_integer("noise_seed", self.noise_seed, 0, MAX_SEED)
        if self.denoise_steps is not None:
            _check_integer("denoise_steps", self.denoise_steps, 1, MAX_DENOISE_STEPS)
        if self.speed is not None:
            _check_range("speed", self.speed, 0.0, math.inf)


@dataclass(frozen=True, eq=False)
class LLMGenerationResponse:
    """The answer to one request.

    token_ids include the stop token; text includes neither it nor a stop string. finish_reason: "stop" (stop
    token or string), "length" (max_tokens or the cache's capacity), "cancelled". logprobs: per token, (id,
    natural log-probability) of the most likely tokens in falling order, then the token itself if it is not
    among them; None if not asked for. actions [n, T, A] in physical units and paths [n, T+1, 4] (x, y,
    heading, speed in the start frame), or None if none were asked for, the model did not announce any, or the
    request was cancelled. lora: the adapter that answered, "" = the base model. metrics: seconds per stage of
    the whole batch (tokenize_s, vision_s, audio_s, prefill_s, decode_s, action_s, keep_s: keeping the prompt
    for later requests), first_token_s and total_s. reused_tokens: how many tokens of the prompt were there
    from earlier requests.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    logprobs: list[list[tuple[int, float]]] | None
    actions: np.ndarray | None
    paths: np.ndarray | None
    noise_seed: int
    lora: str
    metrics: dict[str, float]
    reused_tokens: int = 0
