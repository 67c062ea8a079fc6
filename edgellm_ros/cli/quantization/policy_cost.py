# SPDX-License-Identifier: Apache-2.0
"""Measures what products in 8 bits cost a policy.

The actions of an engine are compared with those of the checkpoint's own weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from edgellm_ros.builder.exporter.options import ExportOptions
from edgellm_ros.cli.quantization.cost import unrounded_engine
from edgellm_ros.diffusion.policy_config import PolicyConfig
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams

OBSERVATIONS = 8
TASKS = ("pick up the cube", "open the drawer", "fold the towel", "push the button")
HEIGHT, WIDTH, TILE = 480, 640, 40  # of an image of coloured tiles, in pixels


@dataclass(frozen=True)
class ActionCost:
    """Actions of an engine beside those that it had before its weights were rounded.

    Both start from the same noise. Differences are shares of the range that a value has in all actions
    before; values that do not vary are left out.
    """

    chunks: int
    actions: int  # of all chunks
    mean_difference: float  # root mean square
    largest_difference: float
    other_noise: float  # root mean square of the differences that other noise makes, before

    def __str__(self) -> str:
        return (
            f"{self.actions} actions of {self.chunks} chunks: root mean square of differences "
            f"{self.mean_difference:.2%} of the range of the actions, largest {self.largest_difference:.2%} "
            f"(with other noise {self.other_noise:.2%})"
        )


def measure_action_cost(
    checkpoint: str | Path,
    engine: str | Path,
    options: ExportOptions,
    requests: Mapping[str, LLMGenerationRequest] | None = None,
) -> ActionCost:
    """Compare the engine of a policy with one of the same checkpoint in floats.

    options: of the other engine, which is written to a temporary directory beside the first; requests: by
    their names in errors, None = random observations. Both run on the CPU.
    """
    with unrounded_engine(checkpoint, Path(engine), options) as reference:
        given = random_observations(reference) if requests is None else _with_noise(requests)
        before, other = (answer_actions(reference, given, first) for first in (0, len(given)))
        return compare_actions(before, answer_actions(Path(engine), given), other)


def compare_actions(before: np.ndarray, after: np.ndarray, other: np.ndarray) -> ActionCost:
    """Compare actions [N,T,A]; other: those before with other noise."""
    ranges = np.ptp(before, axis=(0, 1))
    varies = ranges > 0

    def shares(found: np.ndarray) -> np.ndarray:
        return (found - before)[..., varies] / ranges[varies]

    def mean(values: np.ndarray) -> float:
        return float(np.sqrt((values**2).mean()))

    found = shares(after)
    return ActionCost(
        chunks=len(before),
        actions=before.shape[0] * before.shape[1],
        mean_difference=mean(found),
        largest_difference=float(np.abs(found).max()),
        other_noise=mean(shares(other)),
    )


def answer_actions(
    engine: Path, requests: Mapping[str, LLMGenerationRequest], first_seed: int = 0
) -> np.ndarray:
    """Answer requests on the CPU: actions [N,T,A] in physical units.

    The noise of request i has the seed first_seed + i. ValueError for one that the engine refuses.
    """
    found = []
    with LLMInferenceRuntime(engine) as runtime:
        for seed, (name, request) in enumerate(requests.items(), first_seed):
            try:
                response = runtime.handle_request(replace(request, noise_seed=seed))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            assert response.actions is not None
            found.append(response.actions[0].astype(np.float64))
    return np.stack(found)


def _with_noise(requests: Mapping[str, LLMGenerationRequest]) -> dict[str, LLMGenerationRequest]:
    """Return requests without options of text."""
    return {name: replace(each, sampling=SamplingParams()) for name, each in requests.items()}


def random_observations(engine: Path, count: int = OBSERVATIONS) -> dict[str, LLMGenerationRequest]:
    """Make random requests: images of coloured tiles, normalised states from -1 to 1."""
    policy = EngineConfig.load(engine).policy
    assert policy is not None
    rng = np.random.default_rng(0)
    return {f"observation {i}": _observation(policy, TASKS[i % len(TASKS)], rng) for i in range(count)}


def _observation(policy: PolicyConfig, task: str, rng: np.random.Generator) -> LLMGenerationRequest:
    tiles = (HEIGHT // TILE, WIDTH // TILE, 3)
    images = [rng.integers(0, 256, tiles, dtype=np.uint8) for _ in policy.cameras.names]
    images = [each.repeat(TILE, axis=0).repeat(TILE, axis=1) for each in images]
    state = None
    if policy.state is not None:
        config = policy.state
        values = rng.uniform(-1, 1, config.dim) + np.array(config.shift)
        state = values * np.array(config.scale) + np.array(config.offset)
    return LLMGenerationRequest(task, images=tuple(images), state=state)
