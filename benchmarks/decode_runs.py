# SPDX-License-Identifier: Apache-2.0
"""Requests of a fixed number of tokens, and their decode times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import spread
from benchmarks.kernel_profile import Event, KernelProfile, Row, rows_of
from benchmarks.model_shapes import BYTES_PER_VALUE, ModelShape
from benchmarks.published_models import PublishedModel
from edgellm_ros.diffusion.trajectory_history import check_history, history_tokens
from edgellm_ros.engine.device import Device, HostCopy
from edgellm_ros.engine_directory.chat_template import ChatTemplate
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.multimodal.image_processor import make_image_processor
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.prompt.prompt_builder import PromptBuilder
from edgellm_ros.runtime.request import LLMGenerationRequest, LLMGenerationResponse, Progress, SamplingParams
from edgellm_ros.runtime.text.tokenizer import Tokenizer

FIRST_PROFILED, PROFILED_STEPS = 3, 8
LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz ", np.uint8)


def make_requests(
    batch: int, context: int, tokens: int, frame: tuple[int, int] | None = None
) -> list[LLMGenerationRequest]:
    """Make requests whose prompts are `context` different random letters.

    Each letter is one token of the benchmark's tokenizer. frame: width and height of a random image before
    the letters; None = no image.
    """
    rng = np.random.default_rng(0)
    sampling = SamplingParams(max_tokens=tokens)
    prompts = [rng.choice(LETTERS, context).tobytes().decode() for _ in range(batch)]
    images = [()] * batch if frame is None else [(make_frame(*frame, seed),) for seed in range(batch)]
    return [
        LLMGenerationRequest(prompt=prompt, images=image, sampling=sampling)
        for prompt, image in zip(prompts, images, strict=True)
    ]


def make_frame(width: int, height: int, seed: int) -> np.ndarray:
    """Make a random image [H,W,3] uint8."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def bytes_per_step(
    shape: ModelShape | PublishedModel, precision: str, batch: int, context: int, tokens: int
) -> dict[str, int]:
    """Compute the average bytes a decode step moves: {"weights", "kv_cache", "state"}.

    The first of tokens - 1 steps reads context + 1 rows of each sequence, the last context + tokens - 1. A
    recurrent state is read and written.
    """
    width = BYTES_PER_VALUE[precision]
    rows = context + tokens / 2
    return {
        "weights": shape.parameters_per_step * width,
        "kv_cache": round(batch * rows * shape.cache_values_per_token * width),
        "state": 2 * batch * shape.state_bytes,
    }


def prompt_ids(checkpoint: Path, config: EngineConfig, request: LLMGenerationRequest) -> list[int]:
    """Return a request's prompt ids, with one placeholder for each row of its images."""
    tokenizer = Tokenizer(checkpoint / "tokenizer.json")
    builder = PromptBuilder(tokenizer, ChatTemplate(checkpoint / "chat_template.jinja"), config)
    rows = []
    if request.images and config.vision is not None:
        processor = make_image_processor(config.vision)
        rows = [int(np.prod(processor.token_grid(*image.shape[:2]))) for image in request.images]
    history = []
    if config.expert is not None:
        points = check_history(request.history, config.expert.trajectory_history)
        history = history_tokens(points, config.expert.trajectory_history)
    return builder.build(request, rows, [], history)


def decode(
    runtime: LLMInferenceRuntime, requests: Sequence[LLMGenerationRequest]
) -> list[LLMGenerationResponse]:
    """Return the answers; RuntimeError if one ended before max_tokens."""
    responses = runtime.handle_request(requests)
    for request, response in zip(requests, responses, strict=True):
        found, expected = len(response.token_ids), request.sampling.max_tokens
        if found != expected:
            raise RuntimeError(f"an answer ended after {found} of {expected} tokens")
    return responses


def measure(
    runtime: LLMInferenceRuntime, device: Device, requests: Sequence[LLMGenerationRequest], runs: int
) -> dict[str, Any]:
    """Measure the stages, decode steps, tokens per second and host time per step.

    The host time is the host's own work. The runtime must be warm.
    """
    steps = requests[0].sampling.max_tokens - 1  # the first token is from the prefill
    vision_s, prefill_s, first_s, decode_s, wall_s = [], [], [], [], []
    for _ in range(runs):
        start = time.perf_counter()
        metrics = decode(runtime, requests)[0].metrics
        wall_s.append((time.perf_counter() - start - metrics["first_token_s"]) / steps)
        vision_s.append(metrics["vision_s"])
        prefill_s.append(metrics["prefill_s"])
        first_s.append(metrics["first_token_s"])
        decode_s.append(metrics["decode_s"] / steps)
    times = observe_steps(runtime, device, requests)
    return {
        "batch": len(requests),
        "vision_ms": _milliseconds(vision_s),  # from the image to rows of embeddings
        "prefill_ms": _milliseconds(prefill_s),
        "first_token_ms": _milliseconds(first_s),  # from the request
        "decode_ms": _milliseconds(decode_s),
        "wall_ms": _milliseconds(wall_s),
        "step_ms": _milliseconds(times.interval_s),
        "tokens_per_s": len(requests) / median(decode_s),
        "host_us_per_step": None if device.stream is None else 1e6 * median(times.host_s),
        "queue_us_per_step": None if device.stream is None else 1e6 * median(times.queue_s),
    }


def _milliseconds(seconds: list[float]) -> dict[str, float]:
    return {name: 1e3 * value for name, value in spread(seconds).items()}


@dataclass(frozen=True)
class StepTimes:
    """Times of decode steps in seconds.

    - interval_s: from the tokens of one step to those of the next
    - host_s: the part of each interval in which the host did not wait for the device
    - queue_s: the part of that in which the host queued a step
    """

    interval_s: list[float]
    host_s: list[float]
    queue_s: list[float]


def observe_steps(
    runtime: LLMInferenceRuntime, device: Device, requests: Sequence[LLMGenerationRequest]
) -> StepTimes:
    """Decode once; record when the host waits for a step's tokens and queues a step.

    Both are recorded for each step. In between the host converts tokens to text. Requests without
    `on_progress` report nothing.
    """
    waits = _Spans()
    queues = _Spans()
    method, copy_to_host = runtime.pipeline.method, device.copy_to_host
    device.copy_to_host = lambda source: _TimedCopy(copy_to_host(source), waits)
    method.queue = queues.around(method.queue)
    try:
        decode(runtime, requests)
    finally:
        del device.copy_to_host, method.queue  # restores the methods of the classes
    begins, ends = np.array(waits.spans).T
    queued = [stop - start for start, stop in queues.spans]
    return StepTimes(np.diff(ends).tolist(), (begins[1:] - ends[:-1]).tolist(), queued)


class _Spans:
    """Begin and end of each call of a function."""

    def __init__(self) -> None:
        self.spans: list[tuple[float, float]] = []

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same and is timed."""

        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self.spans.append((start, time.perf_counter()))

        return timed


class _TimedCopy:
    def __init__(self, copy: HostCopy, waits: _Spans) -> None:
        self.wait = waits.around(copy.wait)


def profile_steps(
    runtime: LLMInferenceRuntime, requests: Sequence[LLMGenerationRequest], profile: KernelProfile
) -> list[Row]:
    """Profile the kernels of some decode steps.

    ValueError if the answers are too short.
    """
    return rows_of(profile_events(runtime, requests, profile), PROFILED_STEPS)


def profile_events(
    runtime: LLMInferenceRuntime, requests: Sequence[LLMGenerationRequest], profile: KernelProfile
) -> list[Event]:
    """Record the kernels of PROFILED_STEPS decode steps.

    ValueError if the answers are too short.
    """
    last = FIRST_PROFILED + PROFILED_STEPS
    if requests[0].sampling.max_tokens <= last + 1:
        raise ValueError(
            f"a profile needs more than {last + 1} tokens per answer, got {requests[0].sampling.max_tokens}"
        )
    events: list[Event] = []

    def listen(progress: Progress) -> None:
        if (progress.stage, progress.step) == ("decode", FIRST_PROFILED):
            profile.start()
        elif (progress.stage, progress.step) == ("decode", last):
            events.extend(profile.stop())

    decode(runtime, [replace(requests[0], on_progress=listen), *requests[1:]])
    return events
