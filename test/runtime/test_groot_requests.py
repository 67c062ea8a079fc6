# SPDX-License-Identifier: Apache-2.0
"""Requests to an engine of GR00T: cameras, tasks, states, relative actions."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm_ros.builder import export
from edgellm_ros.builder.exporter.options import ExportOptions
from edgellm_ros.builder.exporter.plan import plan_export
from edgellm_ros.diffusion.action_spaces import make_reference
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures.groot_checkpoint import ROBOT, GrootShape, write_groot
from fixtures.groot_requests import STATE, answer, image, request

ARM = {"rep": "RELATIVE", "type": "NON_EEF", "format": "DEFAULT", "state_key": None}
POSE = {"rep": "RELATIVE", "type": "EEF", "format": "XYZ_ROT6D", "state_key": None}


def exported(directory, shape):
    write_groot(directory / "checkpoint", shape=shape)
    export(directory / "checkpoint", directory / "engine", embodiment=ROBOT)
    return directory / "engine"


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return exported(tmp_path_factory.mktemp("groot"), GrootShape(representations={"arm": ARM}))


@pytest.fixture(scope="module")
def runtime(engine, device):
    with LLMInferenceRuntime(engine, device) as runtime:
        yield runtime


def test_equal_requests_have_equal_answers_and_every_input_counts(runtime):
    actions = answer(runtime)
    assert actions.shape == (1, 5, 4)
    np.testing.assert_array_equal(answer(runtime), actions)
    for changes in (
        {"images": (image(seed=2), image(seed=1))},
        {"images": (image(), image(seed=2))},
        {"images": (image(64, 48), image(seed=1))},
        {"noise_seed": 4},
        {"denoise_steps": 2},
    ):
        assert np.abs(answer(runtime, **changes) - actions).max() > 1e-4, changes
    assert np.abs(answer(runtime, "open the drawer") - actions).max() > 1e-4


def test_a_task_is_in_small_letters_without_punctuation(runtime):
    np.testing.assert_array_equal(answer(runtime, "Pick up: the Cube!"), answer(runtime))
    np.testing.assert_array_equal(answer(runtime, ""), answer(runtime, "perform the task"))


def test_samples_are_those_of_single_requests(runtime):
    both = answer(runtime, action_samples=2)
    np.testing.assert_allclose(both[:1], answer(runtime), atol=1e-4)
    assert np.abs(both[1] - both[0]).max() > 1e-3


def test_relative_actions_are_added_to_the_state(runtime, engine):
    """Beyond its limits a state changes nothing but what it is added to."""
    far = STATE + np.float32([10, 0, 0, 0])
    farther = STATE + np.float32([12, 0, 0, 0])
    difference = answer(runtime, state=farther) - answer(runtime, state=far)
    np.testing.assert_allclose(difference[..., 0], 2, atol=1e-5)
    np.testing.assert_allclose(difference[..., 1:], 0, atol=1e-5)
    assert EngineConfig.load(engine).policy.action_space.references == (0, 1, 2, -1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": (image(),), "cameras": ("wrist",)}, "1 images; groot needs one of each camera: front, w"),
        ({"images": (image(), image(30, 200))}, "wrist: an image of 200x30 pixels becomes 28 rows, .* 8$"),
        ({"state": STATE[:3]}, r"state must have shape \[4\] \(arm_0, arm_1, arm_2, gripper\)"),
        ({"prompt": "a" * 300}, "the prompt has 3.. tokens; the policy takes at most 256"),
    ],
)  # fmt: skip
def test_requests_that_do_not_fit_are_refused(runtime, changes, message):
    changes = dict(changes)
    with pytest.raises(ValueError, match=message):
        runtime.handle_request(request(changes.pop("prompt", "pick"), **changes))


def test_a_relative_pose_is_in_the_frame_of_the_state(tmp_path):
    """A quarter turn about z, and a point beside it."""
    shape = GrootShape(state={"tip": 9}, actions={"tip": 9}, representations={"tip": POSE}, model_dim=9)
    write_groot(tmp_path, shape=shape)
    space = plan_export(tmp_path, ExportOptions(embodiment=ROBOT)).config.policy.action_space
    turn = [0.0, -1, 0, 1, 0, 0]  # rows of the matrix
    reference = make_reference(np.array([1, 2, 3, *turn], np.float32), space)
    still = np.array([[0, 0, 0, 1, 0, 0, 0, 1, 0], [5, 0, 0, *turn]], np.float32)
    found = reference.absolute(still)
    np.testing.assert_allclose(found[0], [1, 2, 3, *turn], atol=1e-6)
    np.testing.assert_allclose(found[1], [1, 7, 3, -1, 0, 0, 0, -1, 0], atol=1e-6)
    np.testing.assert_allclose(reference.relative(found), still, atol=1e-6)


def test_an_image_stands_for_those_of_earlier_times(tmp_path):
    engine = exported(tmp_path, GrootShape(cameras=("front",), frames=(-15, 0)))
    with LLMInferenceRuntime(engine) as runtime:
        response = runtime.handle_request(request(images=(image(),)))
        other = answer(runtime, images=(image(seed=1),))
    text = EngineConfig.load(engine).policy
    tokens = len(text.prompt_before) + len("pick up the cube") + len(text.prompt_after)
    assert response.prompt_tokens == 2 * 6 + tokens
    assert np.abs(other - response.actions).max() > 1e-4
