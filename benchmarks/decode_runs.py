# SPDX-License-Identifier: Apache-2.0
"""Requests that decode a given number of tokens, how long that takes, and what a step costs the host."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import spread
from benchmarks.kernel_profile import KernelProfile, Row
from edgellm_ros.engine.device import Device, HostCopy
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, LLMGenerationResponse, Progress, SamplingParams

FIRST_PROFILED, PROFILED_STEPS = 3, 8
LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz ", np.uint8)


def make_requests(batch: int, context: int, tokens: int) -> list[LLMGenerationRequest]:
    """Prompts of `context` random letters, each its own: as many tokens with the benchmark's tokenizer."""
    rng = np.random.default_rng(0)
    sampling = SamplingParams(max_tokens=tokens)
    return [
        LLMGenerationRequest(prompt=rng.choice(LETTERS, context).tobytes().decode(), sampling=sampling)
        for _ in range(batch)
    ]


def decode(
    runtime: LLMInferenceRuntime, requests: Sequence[LLMGenerationRequest]
) -> list[LLMGenerationResponse]:
    """The answers. RuntimeError if one ended before max_tokens."""
    responses = runtime.handle_request(requests)
    for request, response in zip(requests, responses, strict=True):
        found, expected = len(response.token_ids), request.sampling.max_tokens
        if found != expected:
            raise RuntimeError(f"an answer ended after {found} of {expected} tokens")
    return responses


def measure(
    runtime: LLMInferenceRuntime, device: Device, requests: Sequence[LLMGenerationRequest], runs: int
) -> dict[str, Any]:
    """Milliseconds of prefill and decode steps, tokens per second, host microseconds. The runtime is warm."""
    steps = requests[0].sampling.max_tokens - 1  # the first token comes out of the prefill
    prefill_s, decode_s, wall_s = [], [], []
    for _ in range(runs):
        start = time.perf_counter()
        metrics = decode(runtime, requests)[0].metrics
        wall_s.append((time.perf_counter() - start - metrics["first_token_s"]) / steps)
        prefill_s.append(metrics["prefill_s"])
        decode_s.append(metrics["decode_s"] / steps)
    times = observe_steps(runtime, device, requests)
    return {
        "batch": len(requests),
        "prefill_ms": _milliseconds(prefill_s),
        "decode_ms": _milliseconds(decode_s),
        "wall_ms": _milliseconds(wall_s),
        "step_ms": _milliseconds(times.interval_s),
        "tokens_per_s": len(requests) / median(decode_s),
        "host_us_per_step": None if device.stream is None else 1e6 * median(times.host_s),
    }


def _milliseconds(seconds: list[float]) -> dict[str, float]:
    return {name: 1e3 * value for name, value in spread(seconds).items()}


@dataclass(frozen=True)
class StepTimes:
    """Seconds from step to step, and how much of them the host did not wait for the device."""

    interval_s: list[float]
    host_s: list[float]


def observe_steps(
    runtime: LLMInferenceRuntime, device: Device, requests: Sequence[LLMGenerationRequest]
) -> StepTimes:
    """Decode once, listening to the progress of the first request and timing all that waits for a reading."""
    now: list[float] = []
    waited: list[float] = []
    readings = _TimedReadings(device)

    def listen(progress: Progress) -> None:
        if progress.stage == "decode":
            now.append(time.perf_counter())
            waited.append(readings.seconds)

    device.copy_to_host = readings.copy_to_host
    try:
        decode(runtime, [replace(requests[0], on_progress=listen), *requests[1:]])
    finally:
        del device.copy_to_host  # the class's own again
    interval = np.diff(now)
    return StepTimes(interval.tolist(), (interval - np.diff(waited)).tolist())


class _TimedReadings:
    """Stands between the runtime and a device's `copy_to_host`; `seconds` is the time spent in `wait`."""

    def __init__(self, device: Device) -> None:
        self.seconds = 0.0
        self._read_later = device.copy_to_host

    def copy_to_host(self, source: Tensor) -> HostCopy:
        return _TimedReading(self._read_later(source), self)


class _TimedReading:
    def __init__(self, reading: HostCopy, times: _TimedReadings) -> None:
        self._reading = reading
        self._times = times

    def wait(self) -> np.ndarray:
        start = time.perf_counter()
        try:
            return self._reading.wait()
        finally:
            self._times.seconds += time.perf_counter() - start


def profile_steps(
    runtime: LLMInferenceRuntime, requests: Sequence[LLMGenerationRequest], profile: KernelProfile
) -> list[Row]:
    """Kernels of a few decode steps. ValueError if there are not so many."""
    last = FIRST_PROFILED + PROFILED_STEPS
    if requests[0].sampling.max_tokens <= last + 1:
        raise ValueError(f"a profile needs more than {last + 1} tokens")
    rows: list[Row] = []

    def listen(progress: Progress) -> None:
        if (progress.stage, progress.step) == ("decode", FIRST_PROFILED):
            profile.start()
        elif (progress.stage, progress.step) == ("decode", last):
            rows.extend(profile.stop(PROFILED_STEPS))

    decode(runtime, [replace(requests[0], on_progress=listen), *requests[1:]])
    return rows
