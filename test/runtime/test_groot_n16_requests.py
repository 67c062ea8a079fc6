# SPDX-License-Identifier: Apache-2.0
"""Requests to an engine of GR00T N1.6: cameras, tasks, and the layout of a prompt."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm_ros.builder import export
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.engine_directory.rope_config import RopeConfig
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.policy.cropped_rows import prompt_layout
from fixtures.groot_checkpoint import ROBOT
from fixtures.groot_n16_checkpoint import write_groot_n16
from fixtures.groot_requests import STATE, answer, image, request


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("groot_n16")
    export(write_groot_n16(folder / "checkpoint"), folder / "engine", embodiment=ROBOT)
    return folder / "engine"


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
        {"images": (image(seed=1), image())},
        {"state": STATE / 2},
        {"noise_seed": 4},
        {"denoise_steps": 2},
    ):
        assert np.abs(answer(runtime, **changes) - actions).max() > 1e-4, changes
    for task in ("open the drawer", "pick up the cube "):  # a space before <image 1> is a token
        assert np.abs(answer(runtime, task) - actions).max() > 1e-4, task


def test_a_task_is_in_small_letters_without_punctuation_and_may_be_empty(runtime):
    np.testing.assert_array_equal(answer(runtime, "Pick up: the Cube!"), answer(runtime))
    np.testing.assert_array_equal(answer(runtime, ""), answer(runtime, "?!"))
    assert np.abs(answer(runtime, "") - answer(runtime, "perform the task")).max() > 1e-4


def test_tokens_and_rows_of_a_prompt_are_counted(runtime, engine):
    policy = EngineConfig.load(engine).policy
    response = runtime.handle_request(request("open it"))
    text = "user\nopen it<image 1>"  # each letter but the merged "im" and "in" is a token
    tokens = len(policy.prompt_before) + len(text.replace("im", "i")) + len(policy.prompt_after)
    assert response.prompt_tokens == 2 * 6 + tokens


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": (image(),), "cameras": ("wrist",)}, "1 images; groot needs one of each camera: front, w"),
        ({"images": (image(), image(30, 200))}, "wrist: an image of 200x30 pixels becomes 30 rows, .* 10$"),
        ({"state": STATE[:3]}, r"state must have shape \[4\] \(arm_0, arm_1, arm_2, gripper\)"),
        ({"prompt": "a" * 300}, "the prompt has 3.. tokens; the policy takes at most 256"),
    ],
)  # fmt: skip
def test_requests_that_do_not_fit_are_refused(runtime, changes, message):
    changes = dict(changes)
    with pytest.raises(ValueError, match=message):
        runtime.handle_request(request(changes.pop("prompt", "pick"), **changes))


def test_rows_without_axes_have_the_positions_of_the_prompt():
    """Two tokens, an image of 2 x 3 rows, a token, an image of one row, two tokens."""
    rope = RopeConfig(1e6, (1.0, 0.01), 1.0, (), False)
    layout = prompt_layout([(2, 3), (1, 1)], 5, (2, 3), rope)
    assert layout["row_order"].tolist() == [7, 8, 0, 1, 2, 3, 4, 5, 9, 6, 10, 11]
    assert layout["row_places"].tolist() == [2, 3, 4, 5, 6, 7, 9, 0, 1, 8, 10, 11]
    angles = np.arange(12)[:, None] * np.array([1.0, 0.01])
    np.testing.assert_allclose(layout["rope_cos"][0], np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(layout["rope_sin"][0], np.sin(angles), atol=1e-6)
