# SPDX-License-Identifier: Apache-2.0
"""LLMInferenceRuntime with a pi0 or pi0.5."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from edgellm_ros.builder import export
from edgellm_ros.diffusion.chunking import ChunkCondition
from edgellm_ros.diffusion.heads.policy_heads import make_policy_head
from edgellm_ros.multimodal.padded_image import padded_image
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest
from fixtures.pi_checkpoint import CAMERAS, SIDE, write_pi
from fixtures.smolvla_checkpoint import ACTIONS, HORIZON

FRAMES = {
    name: np.random.default_rng(i).integers(0, 256, (*size, 3), dtype=np.uint8)
    for i, (name, size) in enumerate(CAMERAS.items())
}
REQUEST = LLMGenerationRequest(
    "pick it up", images=tuple(FRAMES.values()), state=np.array([0.3, -1, 2]), action_samples=2, noise_seed=7
)
CHUNK = np.linspace(-1, 1, HORIZON * ACTIONS).reshape(HORIZON, ACTIONS)


@pytest.fixture(scope="module", params=["pi0", "pi05"])
def policy(request, tmp_path_factory, device):
    folder = tmp_path_factory.mktemp(request.param)
    export(write_pi(folder / "checkpoint", request.param), folder / "engine")
    with LLMInferenceRuntime(folder / "engine", device) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def expected(policy):
    return policy.handle_request(REQUEST).actions


def changed(**changes) -> LLMGenerationRequest:
    return dataclasses.replace(REQUEST, **changes)


def prompt_of(policy, task, state) -> str:
    config = policy.config.policy
    values = np.zeros((1, config.state.model_dim), np.float32)
    values[0, : len(state)] = state
    return make_policy_head(config).prompt(task, values)


def test_a_prompt_of_pi05_has_the_bins_of_the_state(policy):
    task, state = " put_the\ncube ", (-1.5, 0.0, 1.5)
    if policy.config.policy.kind == "pi0":
        assert prompt_of(policy, task, state) == f"{task}\n"
        assert prompt_of(policy, "go\n", state) == "go\n"
    else:
        assert prompt_of(policy, task, state) == "Task: put the cube, State: -1 128 255;\nAction: "


def test_images_and_prompt_are_the_prefix(policy):
    response = policy.handle_request(REQUEST)
    assert response.actions.shape == (2, HORIZON, ACTIONS)
    config = policy.config.policy
    if config.kind == "pi0":
        prompt = "pick it up\n"
    else:
        affine = (np.array(each, np.float32) for each in (config.state.offset, config.state.scale))
        offset, scale = affine
        normalised = (REQUEST.state.astype(np.float32) - offset) / scale - np.array(config.state.shift)
        prompt = prompt_of(policy, "pick it up", normalised)
    assert response.prompt_tokens == 2 * SIDE**2 + len(prompt)  # the tokenizer has a token per byte


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": "put it down"},
        {"state": np.array([0.8, -1, 2])},
        {"images": (FRAMES["top"], 255 - FRAMES["wrist"])},
        {"images": (FRAMES["wrist"],), "cameras": ("wrist",)},
        {"noise_seed": 8},
        {"denoise_steps": 3},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_actions_depend_on_every_input(policy, expected, changes):
    assert np.abs(policy.handle_request(changed(**changes)).actions - expected).max() > 1e-4


def test_the_same_request_gives_the_same_bits_alone_and_in_a_batch(policy, expected):
    other = changed(prompt="let go", state=np.zeros(3))
    batch = policy.handle_request([other, REQUEST, other])
    np.testing.assert_array_equal(batch[1].actions, expected)
    np.testing.assert_array_equal(batch[0].actions, batch[2].actions)


def test_a_frozen_chunk_begins_with_the_previous_actions(policy, expected):
    chunk = ChunkCondition(actions=CHUNK, executed=1, delay=2, form="frozen")
    found = policy.handle_request(changed(previous_chunk=chunk)).actions
    np.testing.assert_array_equal(found[:, :2], np.stack([CHUNK[1:3].astype(np.float32)] * 2))
    assert np.abs(found[:, 2:] - expected[:, 2:]).max() > 0.01


def test_a_guided_chunk_is_nearer_to_the_previous_one(policy, expected):
    chunk = ChunkCondition(actions=CHUNK, executed=1, delay=2)
    found = policy.handle_request(changed(previous_chunk=chunk)).actions
    far, near = (np.abs(each[:, :2] - CHUNK[1:3]).mean() for each in (expected, found))
    assert near < 0.5 * far


def test_a_centred_image_is_filled_up_on_both_sides():
    image = np.full((10, 20, 3), 255, np.uint8)
    found = padded_image(image, 21, -3.0, centred=True)
    rows = found[0, :, 0]
    np.testing.assert_array_equal(rows, [-3.0] * 5 + [1.0] * 10 + [-3.0] * 6)
