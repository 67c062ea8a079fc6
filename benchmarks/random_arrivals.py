# SPDX-License-Identifier: Apache-2.0
"""`many_clients --arrivals`: requests of users that come at random times."""

from __future__ import annotations

import argparse
import math
import statistics
from functools import partial
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.clients import Client, long_request, medians, play, ratios
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, LLMGenerationResponse
from edgellm_ros.runtime.scheduling.rows import PART_TOKENS

MANY = 8  # users from which on there is a target for tokens per second
TIMES_THE_TOKENS = 5.0
TIMES_BETWEEN_TOKENS = 1.6
ALONE, PROMPTS = 3, 5  # requests of one user, and long prompts, that are timed


class RandomArrivals:
    """Measures a number of users that ask at random times, with weights of any size.

    The runtime has a row for each user, and one for a client with long prompts.
    """

    def __init__(self, runtime: LLMInferenceRuntime, args: argparse.Namespace, users: int) -> None:
        self._runtime = runtime
        self._args = args
        self._users = users
        self._watch = common.StopWatch()

    def measure(self) -> dict[str, Any]:
        """Return figures of both ways, `long` with --long, and `targets`."""
        self._warm_up()
        alone = self._alone()
        self._watch.done(f"{self._users} users: warm-up", f"one alone: {alone:.3f} s per answer")
        result: dict[str, Any] = {"alone_seconds": alone, **self._both_ways(alone)}
        if self._args.long:
            result["long"] = self._longest_gap(alone)
            self._watch.done("long prompts", str(result["long"]))
        result["targets"] = judged(result, self._users)
        return result

    def _submit(self, request: LLMGenerationRequest) -> LLMGenerationResponse:
        return self._runtime.submit(request).result()

    def _warm_up(self) -> None:
        """Decode batches of each size.

        The first run of a size records CUDA graphs, or compiles kernels.
        """
        steps = max(2, self._args.tokens // self._users)
        lengths = [min(self._args.tokens, steps * (index + 1)) for index in range(self._users)]
        for seed in (1, 2):
            play(self._submit, [Client(tokens, [0.0], seed * 1000 + tokens) for tokens in lengths])
        play(self._runtime.handle_request, [Client(self._args.tokens, [0.0] * 2, seed=3)])

    def _alone(self) -> float:
        """Return the seconds of an answer, without other users."""
        client = Client(self._args.tokens, [0.0] * ALONE, seed=4)
        return play(self._runtime.handle_request, [client]).seconds / ALONE

    def _clients(self, alone: float, number: int) -> list[Client]:
        """Make the users of a round, the same for each way."""
        rng = np.random.default_rng(number)
        gaps = rng.exponential(alone / self._args.arrivals, (self._users, self._args.requests))
        return [
            Client(self._args.tokens, row.tolist(), 100 * number + index) for index, row in enumerate(gaps)
        ]

    def _both_ways(self, alone: float) -> dict[str, Any]:
        play(self._submit, self._clients(alone, 0))
        found: dict[str, list[dict[str, Any]]] = {"handle_request": [], "submit": []}
        for number in range(1, self._args.rounds + 1):
            clients = self._clients(alone, number)
            rounds = {"handle_request": play(self._runtime.handle_request, clients)}
            rounds["submit"] = play(self._submit, clients)
            for way, each in rounds.items():
                found[way].append(each.figures())
            if (
                self._args.precision == "fp32"
                and rounds["submit"].answers != rounds["handle_request"].answers
            ):
                raise ValueError("the answers of both ways are not the same")
            self._watch.done(f"round {number}", str(ratios(*(each[-1] for each in found.values()))))
        both = {way: medians(figures) for way, figures in found.items()}
        return {**both, "ratios": ratios(both["handle_request"], both["submit"])}

    def _longest_gap(self, alone: float) -> dict[str, Any]:
        """Compare gaps beside long prompts with two steps and a part.

        Steps and parts are measured before each round.
        """
        short = Client(1, [0.0] * PROMPTS, seed=6)
        short_prompt = statistics.median(play(self._submit, [short]).times[0].first)
        steps, parts, long_prompts = [], [], []
        beside = partial(long_request, tokens=self._args.long, answer=1)
        gaps: list[float] = []
        units: list[float] = []
        for number in range(self._args.rounds + 1):
            step, part = self._step(), self._part()
            one = play(self._submit, self._clients(alone, number), beside)
            if number:
                steps.append(step)
                parts.append(part)
                long_prompts.append(one.beside / one.seconds)
                gaps += one.between
                units += [gap / (2 * step + part) for gap in one.between]
        return {
            "step_seconds": statistics.median(steps),
            "part_seconds": statistics.median(parts),
            "short_prompt_seconds": short_prompt,
            "longest_seconds": max(gaps),
            "longest": max(units),
            "p99": float(np.quantile(units, 0.99)),
            "gaps": len(gaps),
            "gaps_above": sum(unit > 1 for unit in units),
            "long_prompts_per_second": statistics.median(long_prompts),
        }

    def _step(self) -> float:
        """Return the seconds of a decode step of all users."""
        clients = [Client(self._args.tokens, [0.0], 7000 + index) for index in range(self._users)]
        return statistics.median(play(self._submit, clients).between)

    def _part(self) -> float:
        """Return the seconds of a part of a long prompt, without other users."""
        rng = np.random.default_rng(5)
        prompts = [self._submit(long_request(rng, self._args.long, answer=1)) for _ in range(PROMPTS)]
        parts = math.ceil(prompts[0].prompt_tokens / PART_TOKENS)
        return statistics.median(each.metrics["prefill_s"] for each in prompts) / parts


def judged(result: dict[str, Any], users: int) -> dict[str, dict[str, Any]]:
    """Return the targets by name, each with its figure and whether it is met."""
    found = result["ratios"]
    targets = {}
    if users >= MANY:
        figure = found["tokens_per_second"]
        targets["tokens_per_second"] = (figure, TIMES_THE_TOKENS, figure >= TIMES_THE_TOKENS)
    figure = found["between_tokens"]
    targets["between_tokens"] = (figure, TIMES_BETWEEN_TOKENS, figure <= TIMES_BETWEEN_TOKENS)
    if "long" in result:
        figure = result["long"]["longest"]
        targets["longest_gap"] = (figure, 1.0, figure <= 1.0)
    return {
        name: {"figure": figure, "target": target, "passed": passed}
        for name, (figure, target, passed) in targets.items()
    }
