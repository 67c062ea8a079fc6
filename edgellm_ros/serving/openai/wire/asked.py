# SPDX-License-Identifier: Apache-2.0
"""What a client asks for, in the runtime's terms."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from edgellm_ros.kernels.random import MAX_SEED
from edgellm_ros.runtime.request import LLMGenerationRequest
from edgellm_ros.serving.openai.wire.tools import NO_TOOLS, ToolUse


@dataclass(frozen=True)
class Asked:
    """The requests whose answers are the choices of one response."""

    model: str  # as the client names it
    requests: tuple[LLMGenerationRequest, ...]  # one for each choice
    choices: int = 1  # per prompt
    stream: bool = False
    include_usage: bool = False  # a last event with the usage, when streamed
    logprobs: int | None = None  # likeliest tokens to report for each token; None = no log-probabilities
    tools: ToolUse = NO_TOOLS


def repeated(request: LLMGenerationRequest, count: int) -> tuple[LLMGenerationRequest, ...]:
    """Return a request for each of several answers, which differ in their seeds."""
    sampling = request.sampling
    seeds = ((sampling.seed + index) % (MAX_SEED + 1) for index in range(1, count))
    others = (
        dataclasses.replace(request, sampling=dataclasses.replace(sampling, seed=seed)) for seed in seeds
    )
    return (request, *others)
