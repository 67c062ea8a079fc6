# SPDX-License-Identifier: Apache-2.0
"""Goals and commands without sampling of their own are the checkpoint's."""

from __future__ import annotations

import pytest
from edgellm_ros.action import Plan

from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams
from fixtures.peer import image_message
from fixtures.sampled_answers import PROMPT, SAMPLED, TOKENS


@pytest.fixture(scope="module")
def node(start_node, peer, sampling_engine):
    child = start_node(
        engine_dir=sampling_engine, autostart="true", max_tokens=TOKENS, max_input_age=600.0,
        plan_timeout=60.0, input_reliability="reliable",
    )  # fmt: skip
    peer.connect()
    return child


@pytest.fixture(scope="module")
def answer(sampling_engine, runtime_device, scene):
    """`answer(seed, ...)`: the tokens that the runtime answers in process."""
    with LLMInferenceRuntime(sampling_engine, runtime_device, drafting="off") as runtime:

        def answer(**sampling: object) -> list[int]:
            sampling = SamplingParams(max_tokens=TOKENS, **sampling)
            request = LLMGenerationRequest(PROMPT, images=(scene.pixels,), sampling=sampling)
            return runtime.handle_request(request).token_ids

        yield answer


def tokens(peer, scene, **sampling: object) -> list[int]:
    """Return the tokens of a goal's answer."""
    goal = Plan.Goal(prompt=PROMPT, images=[image_message(scene.pixels)], action_samples=0)
    for name, value in sampling.items():
        setattr(goal.sampling, name, value)
    result = peer.plan(goal)
    assert (result.termination_reason, result.message) == ("completed", "")
    return list(result.generation.token_ids)


def test_a_goal_is_sampled_as_the_checkpoint_says(node, peer, scene, answer):
    assert tokens(peer, scene, seed=3) == answer(seed=3, **SAMPLED) != answer(seed=3, temperature=0.0)


def test_a_goal_with_a_temperature_of_0_is_greedy(node, peer, scene, answer):
    assert tokens(peer, scene, seed=3, temperature=0.0) == answer(temperature=0.0)


def test_a_parameter_of_the_node_goes_before_the_checkpoint(node, peer, scene, answer):
    assert peer.set_parameter("temperature", 0.7).successful
    assert tokens(peer, scene, seed=3) == answer(seed=3, temperature=0.7)
    assert peer.set_parameter("temperature", -1.0).successful


def test_a_command_is_sampled_as_the_checkpoint_says(node, peer, scene, answer):
    assert peer.set_parameter("seed", 5).successful
    peer.clear()
    peer.frame(scene.pixels)
    peer.wait(lambda: peer.metrics()["frames_received"], "frame")
    peer.command(PROMPT)
    peer.wait(lambda: peer.received["generation"], "answer")
    assert list(peer.received["generation"][0].token_ids) == answer(seed=5)
