# SPDX-License-Identifier: Apache-2.0
"""Prints answers: as they grow, as JSON, and in words."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from edgellm_ros.diffusion.policy_config import AffineSpaceConfig
    from edgellm_ros.runtime.metrics import SpecDecodeGenerationMetrics
    from edgellm_ros.runtime.request import LLMGenerationResponse, Progress


class Streamer:
    """Prints a growing text piece by piece."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._printed = 0

    def __call__(self, progress: Progress) -> None:
        self._print(progress.text, end="")

    def finish(self, text: str) -> None:
        """Print the rest and end the line."""
        self._print(text, end="\n")

    def _print(self, text: str, end: str) -> None:
        print(text[self._printed :], end=end, flush=True, file=self._file)
        self._printed = max(self._printed, len(text))


def to_json(response: LLMGenerationResponse, with_logprobs: bool) -> dict[str, Any]:
    """Return the answer as JSON types.

    `actions` n x T x A and `paths` n x (T + 1) x (x, y, heading, speed) are None without a trajectory.
    """
    result = {
        "text": response.text,
        "token_ids": [int(token) for token in response.token_ids],
        "finish_reason": response.finish_reason,
        "prompt_tokens": response.prompt_tokens,
        "steps": response.steps,
        "actions": None if response.actions is None else response.actions.tolist(),
        "paths": None if response.paths is None else response.paths.tolist(),
        "noise_seed": int(response.noise_seed),
        "lora": response.lora,
        "metrics": {name: float(value) for name, value in response.metrics.items()},
    }
    if response.tool_calls or response.tool_call_errors:
        result["content"] = response.content
        result["tool_calls"] = [
            {"name": call.name, "arguments": call.arguments} for call in response.tool_calls
        ]
        result["tool_call_errors"] = list(response.tool_call_errors)
    if response.grammar_complete is not None:
        result["grammar_complete"] = response.grammar_complete
    if with_logprobs:
        result["logprobs"] = [
            [[int(token), float(value)] for token, value in step] for step in response.logprobs or []
        ]
    return result


def action_table(response: LLMGenerationResponse, space: AffineSpaceConfig) -> str:
    """Write a policy's actions as text: a line for each, below the names of values."""
    units = (f" [{unit}]" if unit else "" for unit in space.units)
    names = [f"{name}{unit}" for name, unit in zip(space.names, units, strict=True)]
    lines = ["\t".join(["sample", "time [s]", *names])]
    for sample, actions in enumerate(() if response.actions is None else response.actions):
        for step, action in enumerate(actions):
            values = (f"{value:.6g}" for value in action)
            lines.append("\t".join([str(sample), f"{step * space.dt:.6g}", *values]))
    return "\n".join(lines)


def describe(response: LLMGenerationResponse) -> str:
    """Describe tokens, times and trajectories for people, one line each."""
    metrics = response.metrics
    if not response.token_ids and response.paths is None and response.actions is not None:  # a policy
        samples, horizon, _ = response.actions.shape
        return (
            f"[{response.prompt_tokens} rows of the prefix, {samples} x {horizon} actions, "
            f"total {metrics['total_s'] * 1e3:.0f} ms]"
        )
    cut = " before the grammar is complete" if response.grammar_complete is False else ""
    lines = [
        f"[{response.prompt_tokens} prompt tokens, {len(response.token_ids)} new, finish: "
        f"{response.finish_reason}{cut}, first token {metrics['first_token_s'] * 1e3:.0f} ms, "
        f"total {metrics['total_s'] * 1e3:.0f} ms]"
    ]
    lines += [f"[calls {call.name}({json.dumps(call.arguments)})]" for call in response.tool_calls]
    lines += [f"[{error}]" for error in response.tool_call_errors]
    for index, path in enumerate([] if response.paths is None else response.paths):
        x, y, heading, speed = path[-1]
        end = f"x {x:.2f} m, y {y:.2f} m, heading {math.degrees(heading):.0f} deg, {speed:.2f} m/s"
        lines.append(f"[trajectory {index}: ends at {end}]")
    return "\n".join(lines)


def describe_drafting(metrics: SpecDecodeGenerationMetrics) -> str:
    """Describe for people how many tokens a run of the model gave, thanks to drafts."""
    if not metrics.strategy:
        return "[not drafted: one token per run of the model]"
    return (
        f"[drafted by {metrics.strategy}: {metrics.total_runs} runs of the model verified drafts and gave "
        f"{metrics.tokens_per_verification:.2f} tokens each, {metrics.vanilla_runs} had none and gave one]"
    )
