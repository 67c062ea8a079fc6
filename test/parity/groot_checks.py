# SPDX-License-Identifier: Apache-2.0
"""What the comparisons of GR00T's versions have in common."""

from __future__ import annotations

import numpy as np
from groot_cases import DELAY, END, EXECUTED, NOISE_SEED, SAMPLES, GrootCase

from edgellm_ros.diffusion.chunking import ChunkCondition
from edgellm_ros.diffusion.groot_config import GrootSpaceConfig
from edgellm_ros.runtime.request import LLMGenerationRequest

TOLERANCE = 1e-3  # of the range of an action


def error(space: GrootSpaceConfig, found: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference as a share of the range of an action.

    Values that never change must be equal.
    """
    ranges = 2 * np.array(space.step_scale or [space.scale])
    varies = np.broadcast_to(ranges > 0, found.shape)
    np.testing.assert_array_equal(found[~varies], expected[~varies])
    return float((np.abs(found - expected) / np.where(ranges > 0, ranges, 1))[varies].max())


def inside(space: GrootSpaceConfig, actions: np.ndarray) -> np.ndarray:
    """Tell which values of actions that are not relative are within their limits."""
    absolute = ~np.array(space.relative) & (np.array(space.scale) > 0)
    scale, offset = (
        np.array(getattr(space, f"step_{name}") or [getattr(space, name)])[:, absolute]
        for name in ("scale", "offset")
    )
    return np.abs((actions[..., absolute] - offset) / scale - 1) < 1


def request_of(case: GrootCase, **more) -> LLMGenerationRequest:
    return LLMGenerationRequest(
        case.task,
        images=tuple(case.frames.values()),
        state=case.state,
        action_samples=SAMPLES,
        noise_seed=NOISE_SEED,
        **more,
    )


def previous_chunk(case: GrootCase, space: GrootSpaceConfig) -> ChunkCondition:
    chunk = (case.previous + 1) * np.array(space.scale, np.float32) + np.array(space.offset, np.float32)
    return ChunkCondition(actions=chunk, executed=EXECUTED, delay=DELAY, horizon=END, form="frozen")
