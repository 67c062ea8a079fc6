# SPDX-License-Identifier: Apache-2.0
"""Requests to an ACT: a policy without text, noise and flow."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest

from edgellm_ros.builder import export
from edgellm_ros.diffusion.chunking import ChunkCondition
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest
from fixtures.act_checkpoint import write_act
from fixtures.smolvla_checkpoint import ACTIONS, CAMERAS, HORIZON

FRAMES = {
    name: np.random.default_rng(i).integers(0, 256, (*size, 3), dtype=np.uint8)
    for i, (name, size) in enumerate(CAMERAS.items())
}
REQUEST = LLMGenerationRequest(images=tuple(FRAMES.values()), state=np.array([0.3, -1, 2]))
CHUNK = ChunkCondition(actions=np.zeros((HORIZON, ACTIONS)), executed=1, delay=1)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("act")
    export(write_act(folder / "checkpoint"), folder / "engine")
    return folder / "engine"


@pytest.fixture(scope="module")
def policy(engine, device):
    with LLMInferenceRuntime(engine, device) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def expected(policy):
    return policy.handle_request(REQUEST).actions


def changed(**changes) -> LLMGenerationRequest:
    return dataclasses.replace(REQUEST, **changes)


def test_one_chunk_answers_a_request(policy):
    response = policy.handle_request(REQUEST)
    assert response.actions.shape == (1, HORIZON, ACTIONS)
    assert (response.text, response.token_ids, response.paths, response.finish_reason) == (
        "",
        [],
        None,
        "stop",
    )
    assert response.prompt_tokens == 2 * 4 + 2


@pytest.mark.parametrize("changes", [{"action_samples": 1}, {"noise_seed": 8}, {"cameras": tuple(CAMERAS)}])
def test_nothing_is_random(policy, expected, changes):
    np.testing.assert_array_equal(policy.handle_request(changed(**changes)).actions, expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"state": np.array([0.3, -1, 2.5])},
        {"images": (FRAMES["top"], 255 - FRAMES["wrist"])},
        {"images": (255 - FRAMES["top"], FRAMES["wrist"])},
    ],
)
def test_actions_depend_on_every_input(policy, expected, changes):
    assert np.abs(policy.handle_request(changed(**changes)).actions - expected).max() > 1e-5


def test_a_task_is_not_used_and_the_log_says_so_once(engine, expected, caplog):
    with LLMInferenceRuntime(engine) as runtime, caplog.at_level(logging.WARNING):
        for task in ("pick it up", "put it down"):
            found = runtime.handle_request(changed(prompt=task)).actions
            np.testing.assert_allclose(found, expected, atol=1e-4)
    (line,) = [each.getMessage() for each in caplog.records if "takes no text" in each.getMessage()]
    assert line == "act takes no text: the task 'pick it up' is not used"


def test_a_batch_gives_the_same_bits(policy, expected):
    first, second = policy.handle_request([changed(state=np.zeros(3)), REQUEST])
    np.testing.assert_array_equal(second.actions, expected)
    assert np.abs(first.actions - expected).max() > 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"action_samples": 2}, r"action_samples is 2; this engine takes at most 1 \(max_action_samples\)"),
        ({"denoise_steps": 3}, "denoise_steps is 3, but act has no steps from noise"),
        ({"previous_chunk": CHUNK}, "previous_chunk: this engine's actions come from no flow"),
        (
            {"images": (FRAMES["top"],), "cameras": ("top",)},
            "the request has 1 images; act needs one of each camera: top, wrist",
        ),
        (
            {"images": (FRAMES["top"][:40], FRAMES["wrist"])},
            r"camera top: the image has 40x64 pixels, the policy was trained with 48x64 \(height x width\)",
        ),
        ({"state": None}, r"a policy needs the state \[3\]"),
        ({"system_prompt": "be kind"}, "this engine is a policy, the request has system_prompt"),
    ],
)
def test_requests_that_do_not_fit_are_refused(policy, changes, message):
    with pytest.raises(ValueError, match=message):
        policy.handle_request(changed(**changes))


def test_counters_count_images_and_actions(engine):
    with LLMInferenceRuntime(engine) as runtime:
        runtime.handle_request(REQUEST)
        assert runtime.multimodal_metrics.total_images == 2
        assert runtime.action_metrics.trajectories == runtime.action_metrics.total_runs == 1


def test_submitted_requests_are_answered_one_after_another(policy, expected):
    cancelled = policy.submit(REQUEST)
    cancelled.cancel()
    handles = [policy.submit(REQUEST) for _ in range(3)]
    for handle in handles:
        response = handle.result(60)
        np.testing.assert_array_equal(response.actions, expected)
        assert list(handle) == []
        assert response.metrics["queued_s"] > 0
    assert cancelled.result(60).finish_reason in ("cancelled", "stop")
    with pytest.raises(ValueError, match="this engine is a policy, the request has system_prompt"):
        policy.submit(changed(system_prompt="be brief"))
