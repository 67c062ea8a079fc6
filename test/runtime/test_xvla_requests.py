# SPDX-License-Identifier: Apache-2.0
"""LLMInferenceRuntime with an X-VLA."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from edgellm_ros.builder import export
from edgellm_ros.diffusion.chunking import ChunkCondition
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest
from fixtures.smolvla_checkpoint import ACTIONS, CAMERAS, HORIZON
from fixtures.xvla_checkpoint import TOKENS, write_xvla

FRAMES = {
    name: np.random.default_rng(i).integers(0, 256, (*size, 3), dtype=np.uint8)
    for i, (name, size) in enumerate(CAMERAS.items())
}
REQUEST = LLMGenerationRequest(
    "pick it up", images=tuple(FRAMES.values()), state=np.array([0.3, -1, 2]), action_samples=2, noise_seed=7
)


@pytest.fixture(scope="module")
def policy(tmp_path_factory, device):
    folder = tmp_path_factory.mktemp("xvla")
    export(write_xvla(folder / "checkpoint"), folder / "engine")
    with LLMInferenceRuntime(folder / "engine", device) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def expected(policy):
    return policy.handle_request(REQUEST).actions


def changed(**changes) -> LLMGenerationRequest:
    return dataclasses.replace(REQUEST, **changes)


def test_an_answer_has_chunks_and_no_text(policy, expected):
    response = policy.handle_request(REQUEST)
    assert (response.text, response.actions.shape) == ("", (2, HORIZON, ACTIONS))
    np.testing.assert_array_equal(response.actions, expected)


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


@pytest.mark.parametrize("changes", [{"action_samples": 11}, {"denoise_steps": 45}])
def test_samples_of_many_parts_begin_with_those_of_few(policy, changes):
    """Parts have at most 8 samples, and 20 steps whose noise is uploaded together."""
    many = policy.handle_request(changed(**changes)).actions
    one = policy.handle_request(changed(**{**changes, "action_samples": 1})).actions
    np.testing.assert_allclose(many[:1], one, atol=1e-5)


def test_a_previous_chunk_is_refused(policy):
    chunk = ChunkCondition(actions=np.zeros((HORIZON, ACTIONS)), executed=1, delay=2)
    with pytest.raises(ValueError, match="previous_chunk: this engine's actions come from no flow"):
        policy.handle_request(changed(previous_chunk=chunk))


def test_a_task_of_all_tokens_is_taken_and_a_longer_one_is_refused(policy):
    longest = "x" * (TOKENS - 2)  # between <s> and </s>; the tokenizer has a token per byte
    assert policy.handle_request(changed(prompt=longest)).actions.shape == (2, HORIZON, ACTIONS)
    with pytest.raises(ValueError, match=f"the prompt has {TOKENS + 1} tokens; the policy takes at most"):
        policy.handle_request(changed(prompt=longest + "x"))
