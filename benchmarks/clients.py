# SPDX-License-Identifier: Apache-2.0
"""Clients of a runtime, each a thread, and when the tokens of their answers came."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.prompt_lengths import random_words
from edgellm_ros.runtime.request import LLMGenerationRequest, LLMGenerationResponse, SamplingParams

WORDS = 12  # of a prompt
LETTERS_PER_WORD = 6  # of a long prompt; with the space about as many tokens of the random checkpoint
Ask = Callable[[LLMGenerationRequest], LLMGenerationResponse]
MakeRequest = Callable[[np.random.Generator], LLMGenerationRequest]


@dataclasses.dataclass
class Times:
    """When the answers of a client came, in seconds."""

    first: list[float] = dataclasses.field(default_factory=list)
    between: list[float] = dataclasses.field(default_factory=list)
    tokens: int = 0
    answers: list[list[int]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Client:
    """Asks one request after another.

    Prompts are random words, or commands with the first frame of an episode (`sees`).

    - tokens: of an answer
    - gaps: seconds from the time at which a request was due to the next one; the first one's from the start.
      A request that is due before the answer to the one before it waits for this answer
    """

    tokens: int
    gaps: Sequence[float]
    seed: int
    sees: bool = False

    def run(self, ask: Ask, times: Times) -> None:
        """Ask all requests."""
        rng = np.random.default_rng(self.seed)
        due = time.perf_counter()
        for gap in self.gaps:
            due += gap
            time.sleep(max(0.0, due - time.perf_counter()))
            self._ask(ask, times, self._request(rng))

    def _request(self, rng: np.random.Generator) -> LLMGenerationRequest:
        if self.sees:
            return common.first_look(common.SEED + int(rng.integers(1000)), action_samples=0)
        return LLMGenerationRequest(random_words(rng, WORDS))

    def _ask(self, ask: Ask, times: Times, request: LLMGenerationRequest) -> None:
        arrived: list[float] = []
        request = dataclasses.replace(
            request,
            sampling=SamplingParams(max_tokens=self.tokens, temperature=0.0),
            on_progress=lambda progress: (
                arrived.append(time.perf_counter()) if progress.tokens > len(arrived) else None
            ),
        )
        start = time.perf_counter()
        response = ask(request)
        times.first.append(arrived[0] - start)
        times.between += [after - before for before, after in pairwise(arrived)]
        times.tokens += len(response.token_ids)
        times.answers.append(response.token_ids)


@dataclasses.dataclass
class Round:
    """What all clients have seen.

    - seconds, cpu_seconds: from the start to the last answer; of all threads
    - beside: answers to one more client in these seconds
    """

    times: list[Times]
    seconds: float
    cpu_seconds: float
    beside: int

    def figures(self) -> dict[str, Any]:
        """Return tokens per second and times in seconds."""
        tokens = sum(each.tokens for each in self.times)
        return {
            "tokens_per_second": tokens / self.seconds,
            "cpu_seconds_per_token": self.cpu_seconds / tokens,
            "beside_per_second": self.beside / self.seconds,
            "first_token": _spread([each for client in self.times for each in client.first]),
            "between_tokens": _spread(self.between),
        }

    @property
    def between(self) -> list[float]:
        """The seconds between two tokens, of all answers."""
        return [each for client in self.times for each in client.between]

    @property
    def answers(self) -> list[list[list[int]]]:
        """The tokens of each client's answers."""
        return [each.answers for each in self.times]


def play(ask: Ask, clients: Sequence[Client], beside: MakeRequest | None = None) -> Round:
    """Let all clients ask at once; return what they have seen.

    beside: makes the requests with which one more client asks meanwhile, as often as it can.
    """
    times = [Times() for _ in clients]
    stop = threading.Event()
    threads = [
        threading.Thread(target=client.run, args=(ask, each))
        for client, each in zip(clients, times, strict=True)
    ]
    ends: list[float] = []
    one_more = threading.Thread(target=_ask_again, args=(ask, beside, stop, ends))
    start, cpu = time.perf_counter(), time.process_time()
    if beside is not None:
        one_more.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    stop.set()
    if beside is not None:
        one_more.join()
    return Round(times, seconds, cpu, sum(end <= start + seconds for end in ends))


def long_request(rng: np.random.Generator, tokens: int, answer: int) -> LLMGenerationRequest:
    """Make a request with a prompt of about so many tokens."""
    words = random_words(rng, tokens // LETTERS_PER_WORD)
    return LLMGenerationRequest(words, sampling=SamplingParams(max_tokens=answer, temperature=0.0))


def medians(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over the figures of rounds, and of longest times the longest."""
    result: dict[str, Any] = {}
    for name, first in rounds[0].items():
        values = [each[name] for each in rounds]
        if isinstance(first, dict):
            result[name] = {key: float(np.median([each[key] for each in values])) for key in first}
            result[name]["longest"] = max(each["longest"] for each in values)
        else:
            result[name] = float(np.median(values))
    return result


def ratios(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Return the ratios of the figures of `other` to those of `one`."""
    return {
        "tokens_per_second": other["tokens_per_second"] / one["tokens_per_second"],
        "cpu_seconds_per_token": other["cpu_seconds_per_token"] / one["cpu_seconds_per_token"],
        "first_token": other["first_token"]["median"] / one["first_token"]["median"],
        "between_tokens": other["between_tokens"]["median"] / one["between_tokens"]["median"],
    }


def _ask_again(ask: Ask, make: MakeRequest, stop: threading.Event, ends: list[float]) -> None:
    """Ask until told to stop; `ends` gets the time of each answer."""
    rng = np.random.default_rng(1)
    while not stop.is_set():
        ask(make(rng))
        ends.append(time.perf_counter())


def _spread(seconds: list[float]) -> dict[str, float]:
    return {**common.spread(seconds), "longest": max(seconds)}
