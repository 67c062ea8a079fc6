# SPDX-License-Identifier: Apache-2.0
"""Counters, rates and latencies of the node, for ~/get_metrics and /diagnostics.

Thread-safe.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any

from edgellm_ros.ros.node.worker.job import (
    CANCELLED,
    COMPLETED,
    DRIVING,
    ERROR,
    GOALS,
    PREEMPTED,
    SKIPPED,
    STALE_INPUT,
    TIMEOUT,
    Outcome,
)

LATENCIES = ("queue", "vision", "audio", "prefill", "first_token", "decode", "action", "total")
# All counters, so that each is there with 0 before its first event.
COUNTERS = (
    "frames_received",
    "frames_refused",
    "frames_dropped",
    "further_frames_received",
    "further_frames_refused",
    "odometry_received",
    "odometry_refused",
    "joint_states_received",
    "joint_states_refused",
    "joint_states_incomplete",
    "commands_received",
    "commands_refused",
    "audio_received",
    "audio_refused",
    "utterances",
    "utterances_cut",
    "utterances_stale",
    "utterances_skipped",
    "transcripts_obeyed",
    "transcripts_refused",
    "transcripts_failed",
    "audio_gated",
    "barge_ins",
    "sentences_spoken",
    "sentences_stopped",
    "sentences_dropped",
    "goals_rejected",
    "chunks_continued",
    "chunks_not_continued",
    *(f"plans_{reason}" for reason in (COMPLETED, CANCELLED, PREEMPTED, TIMEOUT, STALE_INPUT, ERROR)),
    *(
        f"{topic}_published"
        for topic in (
            "utterance", "transcript", "generation", "text", "text_stream", "action_chunk", "path", "markers",
            "overlay", "speech",
        )
    ),
)  # fmt: skip
FAILURES = (ERROR, STALE_INPUT, TIMEOUT)
WINDOW = 100  # plans over which latencies are summarised
RATE_WINDOW_S = 5.0
PROBLEM_S = 5.0  # longer than the period of /diagnostics, which would miss a single bad message


class Rate:
    """Events per second over the last few seconds."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=1000)

    def tick(self) -> None:
        """Count one event."""
        self._times.append(time.monotonic())

    @property
    def per_second(self) -> float:
        """Events per second; 0 without recent events."""
        now = time.monotonic()
        recent = [t for t in self._times.copy() if now - t < RATE_WINDOW_S]
        return len(recent) / max(now - recent[0], 1.0) if len(recent) > 1 else 0.0

    @property
    def age(self) -> float:
        """Seconds since the last event; infinite if there was none."""
        return time.monotonic() - self._times[-1] if self._times else float("inf")


class RecentProblem:
    """A problem that is reported for a few seconds."""

    def __init__(self) -> None:
        self._text, self._until = "", 0.0

    @property
    def text(self) -> str:
        """The problem; empty once it is over."""
        return self._text if time.monotonic() < self._until else ""

    def set(self, text: str) -> None:
        """Report a problem from now on."""
        self._text, self._until = text, time.monotonic() + PROBLEM_S

    def clear(self) -> None:
        """Report nothing."""
        self._until = 0.0


class NodeMetrics:
    """Counters since configure, rates, and the latencies of the last plans.

    `problem` is the message of the latest plan if it failed. `gauges`, and the counters of `others`, are read
    by `values`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._latencies: dict[str, deque[float]] = {name: deque(maxlen=WINDOW) for name in LATENCIES}
        self._waits: dict[str, deque[float]] = {kind: deque(maxlen=WINDOW) for kind in (DRIVING, GOALS)}
        self.frames, self.odometry, self.sound, self.plans = Rate(), Rate(), Rate(), Rate()
        self.joint_states = Rate()
        self.gauges: dict[str, Callable[[], float]] = {}
        self.others: Callable[[], dict[str, float]] = dict
        self.problem = ""

    def count(self, name: str, number: int = 1) -> None:
        """Add to a counter; `name` is one of COUNTERS."""
        with self._lock:
            self._counts[name] += number

    def plan_done(self, outcome: Outcome, kind: str = GOALS) -> None:
        """Record the end of a plan of a class; count a skipped frame as dropped."""
        if outcome.reason == SKIPPED:
            self.count("frames_dropped")
            return
        self.count(f"plans_{outcome.reason}")
        if outcome.reason != COMPLETED:
            self.problem = outcome.message if outcome.reason in FAILURES else ""
            return
        self.problem = ""
        self.plans.tick()
        with self._lock:
            for name, values in self._latencies.items():
                values.append(getattr(outcome.result.generation, f"{name}_latency"))
            self._waits[kind].append(outcome.result.generation.queue_latency)

    def values(self) -> dict[str, float]:
        """Return everything by name; times in seconds, memory in bytes."""
        # Read gauges first: if jobs_pending is 0, the counters include the last job.
        values = {name: float(read()) for name, read in self.gauges.items()}
        with self._lock:
            values |= {name: float(count) for name, count in sorted(self._counts.items())}
            measured = {f"{name}_latency": latencies for name, latencies in self._latencies.items()}
            measured |= {f"{kind}_wait": waits for kind, waits in self._waits.items()}
            for name, seconds in measured.items():
                if seconds:
                    values[f"{name}_median"] = median(seconds)
                    values[f"{name}_max"] = max(seconds)
        values |= self.others()
        values["image_rate"] = self.frames.per_second
        values["odometry_rate"] = self.odometry.per_second
        values["joint_state_rate"] = self.joint_states.per_second
        values["audio_rate"] = self.sound.per_second
        values["plan_rate"] = self.plans.per_second
        values["memory_resident"] = float(resident_memory())
        return values


def runtime_values(runtime: Any) -> dict[str, float]:
    """Return the runtime's counters, prefixed with their stage."""
    stages = {
        "prefill": runtime.prefill_metrics,
        "generation": runtime.generation_metrics,
        "spec_decode": runtime.spec_decode_generation_metrics,
        "multimodal": runtime.multimodal_metrics,
        "action": runtime.action_metrics,
        "scheduling": runtime.scheduling_metrics,
    }
    values = {
        f"{stage}_{name}": float(value)
        for stage, metrics in stages.items()
        for name, value in vars(metrics).items()
        if not isinstance(value, str)
    }
    return values | {"share_tokens": float(runtime.share_tokens)}


def resident_memory() -> int:
    """Return the bytes of RAM that this process uses; 0 if the system is not Linux."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
