# SPDX-License-Identifier: Apache-2.0
"""Requests to the runtime, responses, and progress reports."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

import numpy as np

from edgellm_ros.kernels.random import MAX_SEED
from edgellm_ros.multimodal.sound import Sound

MAX_LOGPROBS = 50
MAX_DENOISE_STEPS = 1000
MAX_SPEED = 1000.0  # m/s; speeds become float32 positions
# Kernels compute with float32: beyond these bounds numbers become 0, infinite or denormal on some device.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 1e6
MIN_TOP_P = 1e-30
MIN_PENALTY, MAX_PENALTY = 1e-6, 1e6


def _check_integer(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not low <= value <= high:
        raise ValueError(f"{name} must be an integer from {low} to {high}, got {value!r}")


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not low <= value <= high:
        raise ValueError(f"{name} must be a number from {low:g} to {high:g}, got {value!r}")


def check_speed(name: str, speed: float) -> None:
    """Check a speed in m/s: ValueError outside of 0 to MAX_SPEED."""
    _check_range(name, speed, 0.0, MAX_SPEED)


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are sampled and when an answer ends.

    The same seed gives the same tokens. ValueError names the parameter, its range and the value.
    """

    temperature: float = 0.0  # 0 takes the most likely token, else from 1e-6 to 1e6
    top_k: int = 0  # sample from the k most likely tokens; 0 = off
    top_p: float = 1.0  # sample from the most likely tokens up to this sum, from 1e-30; 1 = off
    min_p: float = 0.0  # drop tokens below this share of the most likely one, from 0 to 1; 0 = off
    repetition_penalty: float = 1.0  # of tokens that occurred already, from 1e-6 to 1e6; 1 = off
    max_tokens: int = 96  # of the answer, from 1
    stop: tuple[str, ...] = ()  # strings that end the answer and are not part of its text
    seed: int = 0  # from 0 to 2**64 - 1

    def __post_init__(self) -> None:
        _check_range("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"temperature must be 0 or a number from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}, "
                f"got {self.temperature!r}"
            )
        _check_range("top_p", self.top_p, MIN_TOP_P, 1.0)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, MIN_PENALTY, MAX_PENALTY)
        _check_integer("top_k", self.top_k, 0, 2**31 - 1)
        _check_integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_integer("seed", self.seed, 0, MAX_SEED)
        if isinstance(self.stop, str) or not all(isinstance(stop, str) and stop for stop in self.stop):
            raise ValueError(f"stop must be a sequence of non-empty strings, got {self.stop!r}")
        object.__setattr__(self, "stop", tuple(self.stop))


@dataclass(frozen=True)
class Progress:
    """Where a request stands."""

    stage: str  # "vision", "audio", "prefill", "decode" or "action"
    text: str  # the answer so far: complete characters only, and no beginning of a stop string
    tokens: int  # of the answer so far
    step: int  # within the stage, from 0


@dataclass(frozen=True, eq=False)
class LLMGenerationRequest:
    """One question to the model.

    ValueError names a field that is out of range or of another type.
    """

    prompt: str  # may be empty
    system_prompt: str = ""
    images: tuple[np.ndarray, ...] = ()  # uint8 [H, W, 3], RGB
    audio: tuple[Sound, ...] = ()  # in the prompt, sounds come before the text
    # past poses (x, y[, heading]) in metres and radians in the robot's present frame, oldest first;
    # None = the robot stood still
    history: np.ndarray | None = None
    speed: float | None = None  # m/s now, from 0 to 1000; None = from the history
    lora: str = ""  # adapter to answer with; "" = the active one, "base" = the base model
    sampling: SamplingParams = SamplingParams()
    logprobs: int = 0  # how many of the most likely tokens to report per token, up to 50
    action_samples: int = 0  # how many trajectories
    noise_seed: int | None = None  # of the trajectories; None = the runtime's
    denoise_steps: int | None = None  # Euler steps, from 1 to 1000; None = the checkpoint's
    on_progress: Callable[[Progress], None] | None = None  # called on the thread that handles the request
    cancel: threading.Event | None = None  # once set, ends the request at the next token or Euler step

    def __post_init__(self) -> None:
        for name in ("prompt", "system_prompt", "lora"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} must be a string, got {getattr(self, name)!r}")
        object.__setattr__(self, "images", tuple(self.images))
        object.__setattr__(self, "audio", tuple(self.audio))
        if not isinstance(self.sampling, SamplingParams):
            raise ValueError(f"sampling must be SamplingParams, got {type(self.sampling).__name__}")
        _check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _check_integer("action_samples", self.action_samples, 0, 2**31 - 1)
        if self.noise_seed is not None:
            _check_integer("noise_seed", self.noise_seed, 0, MAX_SEED)
        if self.denoise_steps is not None:
            _check_integer("denoise_steps", self.denoise_steps, 1, MAX_DENOISE_STEPS)
        if self.speed is not None:
            check_speed("speed", self.speed)


@dataclass(frozen=True, eq=False)
class LLMGenerationResponse:
    """The answer to one request."""

    text: str  # without stop token and stop string
    token_ids: list[int]  # with the stop token
    finish_reason: str  # "stop" (token or string), "length" (max_tokens or KV cache full) or "cancelled"
    prompt_tokens: int
    # per token: (id, natural log-probability) of the most likely tokens, falling, then the sampled token if
    # it is not among them; None if not asked for
    logprobs: list[list[tuple[int, float]]] | None
    # [n, T, A] in physical units; None if not asked for, not announced by the model, or cancelled
    actions: np.ndarray | None
    paths: np.ndarray | None  # [n, T+1, 4]: x, y, heading, speed in the start frame; None as for actions
    noise_seed: int
    lora: str  # the adapter that answered; "" = the base model
    # seconds per stage of the whole batch: tokenize_s, vision_s, audio_s, prefill_s, decode_s, action_s,
    # keep_s (storing the prompt in the prefix cache), first_token_s, total_s
    metrics: dict[str, float]
    reused_tokens: int = 0  # tokens of the prompt that came from the prefix cache
