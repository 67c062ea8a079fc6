# SPDX-License-Identifier: Apache-2.0
"""Policies and actions that LeRobot has saved, against their engines.

The module needs neither PyTorch nor LeRobot. A folder has the checkpoint, and `answers.npz` for a few
observations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edgellm_ros.builder import export
from edgellm_ros.diffusion.policy_config import FlowPolicyConfig
from edgellm_ros.kernels.random import normal_noise
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest

CHECKPOINT, ANSWERS = "checkpoint", "answers.npz"
TOLERANCE = 1e-3  # of the range of the actions
SEED, TASK = 5, "Put the red cube into the box"


def frames_of(cameras: Mapping[str, tuple[int, int]], seed: int) -> list[dict[str, np.ndarray]]:
    """Make bright and dark frames [H, W, 3] uint8 of each camera."""
    rng = np.random.default_rng(seed)
    return [
        {name: rng.integers(0, end, (*size, 3), dtype=np.uint8) for name, size in cameras.items()}
        for end in (256, 60)
    ]


class Answer(NamedTuple):
    """LeRobot's actions for one observation."""

    frames: Mapping[str, np.ndarray]  # by camera, [H, W, 3] uint8
    state: np.ndarray  # [S] float32: the robot's state, then that of the environment
    actions: np.ndarray  # [samples, T, A] float32, physical


def noise(samples: int, horizon: int, values: int) -> np.ndarray:
    """Return the runtime's noise of SEED, [samples, horizon, values] float32."""
    return normal_noise(SEED, samples, horizon * values).reshape(-1, horizon, values)


def write_answers(folder: Path, answers: Sequence[Answer]) -> None:
    arrays = {}
    for i, answer in enumerate(answers):
        arrays |= {f"{i}/state": answer.state, f"{i}/actions": answer.actions}
        arrays |= {f"{i}/frames/{camera}": frame for camera, frame in answer.frames.items()}
    np.savez(folder / ANSWERS, **arrays)


def read_answers(folder: Path) -> list[Answer]:
    with np.load(folder / ANSWERS) as stored:
        arrays = dict(stored)
    return [
        Answer(
            {
                name.removeprefix(f"{i}/frames/"): array
                for name, array in arrays.items()
                if name.startswith(f"{i}/frames/")
            },
            arrays[f"{i}/state"],
            arrays[f"{i}/actions"],
        )
        for i in range(sum(name.endswith("/state") for name in arrays))
    ]


def compare(folder: Path, engine: Path) -> list[Answer]:
    """Export a folder's checkpoint and compare actions; return LeRobot's answers."""
    config, answers = export(folder / CHECKPOINT, engine), read_answers(folder)
    with LLMInferenceRuntime(engine) as runtime:
        for answer in answers:
            cameras, names = tuple(answer.frames), config.policy.cameras.names
            assert [name for name in names if name in cameras] == list(cameras)
            request = LLMGenerationRequest(
                TASK if isinstance(config.policy, FlowPolicyConfig) else "",
                images=tuple(answer.frames.values()),
                cameras=cameras if len(cameras) < len(names) else (),
                state=answer.state if answer.state.size else None,
                action_samples=len(answer.actions),
                noise_seed=SEED,
            )
            found, expected = runtime.handle_request(request).actions, answer.actions
            assert found.shape == expected.shape
            range_ = np.ptp(expected)
            assert range_ > 0.5
            np.testing.assert_allclose(found, expected, atol=TOLERANCE * range_)
    return answers
