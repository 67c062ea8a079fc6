# SPDX-License-Identifier: Apache-2.0
"""Actions relative to the state that a plan is made from."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm_ros.builder import export
from edgellm_ros.diffusion.chunking import ChunkCondition
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest
from fixtures.policy_folders import with_relative_actions
from fixtures.smolvla_checkpoint import ACTIONS, CAMERAS, HORIZON, write_smolvla

STATE = np.float32([0.25, -1.5, 2, 40])
REFERENCE = np.float32([0.25, -1.5, 2, 0])  # the gripper's value is absolute
FRAMES = tuple(np.full((*size, 3), 90, np.uint8) for size in CAMERAS.values())


@pytest.fixture(scope="module")
def policies(tmp_path_factory, device):
    """A policy with relative actions, and the same one without."""
    folder, engines = tmp_path_factory.mktemp("policies"), []
    for name in ("relative", "absolute"):
        checkpoint = write_smolvla(folder / name, state=4)
        if name == "relative":
            names = ["pan", "lift", "elbow", "gripper"]
            with_relative_actions(checkpoint, exclude_joints=["gripper"], action_names=names)
        export(checkpoint, folder / f"{name}_engine")
        engines.append(LLMInferenceRuntime(folder / f"{name}_engine", device))
    yield engines
    for engine in engines:
        engine.close()


def actions(policy, chunk=None, **options):
    condition = None if chunk is None else ChunkCondition(actions=chunk, executed=1, delay=2, **options)
    request = LLMGenerationRequest(
        "pick it up",
        images=FRAMES,
        state=STATE,
        action_samples=2,
        noise_seed=7,
        previous_chunk=condition,
    )
    return policy.handle_request(request).actions


def test_the_state_of_the_plan_is_added_to_relative_values(policies):
    relative, absolute = policies
    np.testing.assert_array_equal(actions(relative), actions(absolute) + REFERENCE)


@pytest.mark.parametrize("form", ["guided", "frozen"])
def test_a_continued_chunk_is_taken_relative_to_the_new_state(policies, form):
    relative, absolute = policies
    chunk = np.linspace(-1, 1, HORIZON * ACTIONS, dtype=np.float32).reshape(HORIZON, ACTIONS)
    expected = actions(absolute, chunk - REFERENCE, form=form) + REFERENCE
    found = actions(relative, chunk, form=form)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert np.abs(found - actions(relative)).max() > 0.01
    if form == "frozen":
        np.testing.assert_array_equal(found[:, :2], np.broadcast_to(chunk[1:3], (2, 2, ACTIONS)))
