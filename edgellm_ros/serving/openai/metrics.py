# SPDX-License-Identifier: Apache-2.0
"""Metrics of the server, in the text format of Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from edgellm_ros.runtime.request import LLMGenerationResponse

MODEL_ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
FIRST_TOKEN_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
TOKEN_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
REQUEST_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics:
    """Counters since the start of the server.

    running: the number of requests that are being answered or wait.
    """

    def __init__(self, running: Callable[[], int]) -> None:
        self._running = running
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._requests = Counter(
            "edgellm_requests", "Requests by endpoint and status", ["endpoint", "status"], registry=registry
        )
        gauge = Gauge(
            "edgellm_requests_running", "Requests answered now, those that wait included", registry=registry
        )
        gauge.set_function(running)
        self._left = Counter(
            "edgellm_clients_left", "Clients that left before their answer", registry=registry
        )
        self._prompt = Counter("edgellm_prompt_tokens", "Tokens of prompts", registry=registry)
        self._cached = Counter(
            "edgellm_cached_prompt_tokens", "Tokens of prompts from the prefix cache", registry=registry
        )
        self._answer = Counter("edgellm_generated_tokens", "Tokens of answers", registry=registry)
        self._first_token_s = Histogram(
            "edgellm_time_to_first_token_seconds",
            "From a request's arrival to the first text of its answer",
            buckets=FIRST_TOKEN_S,
            registry=registry,
        )
        self._token_s = Histogram(
            "edgellm_time_per_output_token_seconds",
            "From an answer's first text to its end, per further token",
            buckets=TOKEN_S,
            registry=registry,
        )
        self._request_s = Histogram(
            "edgellm_request_duration_seconds",
            "From a request's arrival to the end of its answer",
            buckets=REQUEST_S,
            registry=registry,
        )

    def text(self) -> bytes:
        """Return all metrics in the text format."""
        return generate_latest(self._registry)

    def values(self) -> dict[str, float]:
        """Return the main counters by name, from any thread.

        The requests are those of MODEL_ENDPOINTS.
        """
        requests = [
            (int(labels["status"]), count)
            for labels, count in _totals(self._requests)
            if labels["endpoint"] in MODEL_ENDPOINTS
        ]
        return {
            "requests_running": float(self._running()),
            "requests_answered": sum(count for status, count in requests if status < 400),
            "requests_refused": sum(count for status, count in requests if 400 <= status < 499),
            "requests_failed": sum(count for status, count in requests if status >= 500),
            "clients_left": sum(count for _, count in _totals(self._left)),
            "prompt_tokens": sum(count for _, count in _totals(self._prompt)),
            "generated_tokens": sum(count for _, count in _totals(self._answer)),
        }

    def count_request(self, endpoint: str, status: int) -> None:
        self._requests.labels(endpoint, str(status)).inc()

    def count_client_that_left(self) -> None:
        self._left.inc()

    def clock(self) -> AnswerClock:
        """Return the clock of a request that arrives now."""
        return AnswerClock(self)

    def count_answer(self, response: LLMGenerationResponse) -> None:
        """Count the tokens of an answer and its prompt."""
        self._prompt.inc(response.prompt_tokens)
        self._cached.inc(response.reused_tokens)
        self._answer.inc(len(response.token_ids))

    def observe(self, first_s: float | None, rest_s: float, all_s: float, tokens: int) -> None:
        """Add the times of an answer: to its first text, after it, and of the request."""
        if first_s is not None:
            self._first_token_s.observe(first_s)
            if tokens > 1:
                self._token_s.observe(rest_s / (tokens - 1))
        self._request_s.observe(all_s)


class AnswerClock:
    """Measures the answers to one request of a client."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._arrived = time.perf_counter()
        self._first: dict[int, float] = {}  # time of the first text, by choice

    def text(self, index: int) -> None:
        """Note that a piece of a choice's text was there."""
        self._first.setdefault(index, time.perf_counter())

    def end(self, index: int, response: LLMGenerationResponse) -> None:
        """Note that a choice is complete."""
        now, first = time.perf_counter(), self._first.get(index)
        self._metrics.count_answer(response)
        first_s, rest_s = (None, 0.0) if first is None else (first - self._arrived, now - first)
        self._metrics.observe(first_s, rest_s, now - self._arrived, len(response.token_ids))


def _totals(counter: Counter) -> list[tuple[dict[str, str], float]]:
    """Return the labels and the value of each count."""
    samples = [sample for family in counter.collect() for sample in family.samples]
    return [(sample.labels, sample.value) for sample in samples if sample.name.endswith("_total")]
