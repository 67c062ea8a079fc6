# SPDX-License-Identifier: Apache-2.0
"""~/save_system_prompt: computed ahead of time, among plans, kept between runs."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from edgellm_ros.action import Plan
from edgellm_ros.srv import SaveSystemPrompt
from rclpy.executors import SingleThreadedExecutor
from rclpy.lifecycle import LifecycleNode

from edgellm_ros.ros.node.services import Services
from edgellm_ros.ros.node.settings.live_parameters import LiveParameters
from edgellm_ros.ros.node.worker.worker import PlanWorker
from fixtures import on_device
from fixtures.node_limits import limits
from fixtures.peer import image_message

R = Plan.Result
SYSTEM = "you are a polite robot and you answer in one short sentence"


@pytest.fixture(scope="module")
def node(start_node, peer, arena_engine, tmp_path_factory):
    """The node, configured but not active; the file of its prefix cache."""
    kept = tmp_path_factory.mktemp("kept") / "prompts"
    start_node(engine_dir=arena_engine, prefix_cache_file=kept, max_input_age=3.0, plan_timeout=30.0)
    peer.wait(lambda: peer.transition("configure"), "configuration")
    return kept


@pytest.fixture
def active(node, peer):
    if peer.state() == "inactive":
        assert peer.transition("activate")
        peer.connect()
    peer.clear()
    return node


def save(peer, system_prompt=SYSTEM, **fields):
    return peer.call(SaveSystemPrompt, "save_system_prompt", system_prompt=system_prompt, **fields)


def reused_tokens(peer, scene, system_prompt) -> int:
    """How many tokens a goal of its own frame found computed already."""
    before = peer.metrics()["prefill_reused_tokens"]
    frame = image_message(scene.pixels ^ len(system_prompt))
    result = peer.plan(Plan.Goal(prompt=scene.command, system_prompt=system_prompt, images=[frame]))
    assert (result.termination_reason, result.message) == (R.COMPLETED, "")
    return peer.metrics()["prefill_reused_tokens"] - before


def test_a_system_prompt_can_be_saved_before_the_node_is_active(node, peer):
    response = save(peer)
    assert (response.success, response.message) == (True, "")
    assert peer.metrics()["prefill_computed_tokens"] > 10


def test_the_first_goal_with_it_reuses_it(active, peer, scene):
    other = reused_tokens(peer, scene, "another")
    assert reused_tokens(peer, scene, SYSTEM) > other + 10


def test_a_saved_system_prompt_can_be_released_once(active, peer):
    other = "you are another robot"
    assert not save(peer, other, release=True).success
    assert save(peer, other).success
    assert save(peer, other, release=True).success
    response = save(peer, other, release=True)
    assert not response.success
    assert response.message == f"the system prompt '{other}' is not saved for the base model"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"system_prompt": ""}, "the system prompt is empty"),
        ({"system_prompt": "word " * 500}, "this engine takes at most 447 (max_kv_cache_capacity)"),
        (
            {"system_prompt": "word " * 200_001},
            "the system prompt has 1000005 characters, at most 1000000 are taken (parameter limits",
        ),
        ({"lora": "unknown"}, "unknown LoRA adapter 'unknown'"),
    ],
)
def test_what_cannot_be_saved_fails_with_a_message_and_the_node_goes_on(active, peer, scene, fields, message):
    response = save(peer, **fields)
    assert not response.success
    assert message in response.message
    assert reused_tokens(peer, scene, SYSTEM) > 0


def test_saving_waits_for_the_plan_that_runs_and_nothing_waits_for_it(active, peer, scene):
    goal = Plan.Goal(prompt=scene.command, images=[image_message(scene.pixels)])
    goal.action_samples, goal.denoise_steps = 16, 1000
    call = peer.send(goal)
    call.wait_for_stage("action")
    client = peer.node.create_client(SaveSystemPrompt, "/edgellm/save_system_prompt")
    peer.wait(client.service_is_ready, "service")
    saving = client.call_async(SaveSystemPrompt.Request(system_prompt=f"{SYSTEM}!"))
    assert peer.wait(lambda: peer.metrics()["jobs_pending"] == 2, "save that waits")
    assert not saving.done()
    call.cancel()
    peer.wait(saving.done, "response")
    assert saving.result().success
    assert call.result().termination_reason == R.CANCELLED


def test_another_run_of_the_node_goes_on_with_what_was_kept(active, peer, scene):
    frame = image_message(scene.pixels)
    goal = Plan.Goal(
        prompt=scene.command, system_prompt=SYSTEM, images=[frame], noise_seed=3, action_samples=1
    )
    before = peer.plan(goal)
    for label in ("deactivate", "cleanup"):
        assert peer.transition(label)
    assert active.is_file()
    for label in ("configure", "activate"):
        assert peer.transition(label)
    peer.connect()
    assert peer.metrics()["prefill_reused_tokens"] == 0
    after = peer.plan(goal)
    assert after.generation.text == before.generation.text
    actions = [[list(chunk.values) for chunk in plan.action_chunks] for plan in (before, after)]
    # A GPU computes a prompt behind a reused prefix in another order.
    np.testing.assert_allclose(*actions, rtol=0, atol=0 if on_device.chosen == "cpu" else 0.02)
    assert peer.metrics()["prefill_reused_tokens"] > 100


def test_a_file_that_cannot_be_used_is_no_obstacle(active, peer, scene):
    for label in ("deactivate", "cleanup"):
        assert peer.transition(label)
    active.write_bytes(active.read_bytes()[:1000])
    for label in ("configure", "activate"):
        assert peer.transition(label)
    peer.connect()
    assert reused_tokens(peer, scene, SYSTEM) == 0


def test_prompts_that_cannot_be_kept_do_not_keep_the_engines_open(active, peer):
    assert save(peer).success
    shutil.rmtree(active.parent)
    for label in ("deactivate", "cleanup"):
        assert peer.transition(label)
    assert peer.state() == "unconfigured"
    for label in ("configure", "activate"):
        assert peer.transition(label)
    peer.connect()
    assert save(peer).success


def test_calls_that_wait_when_the_services_are_taken_down_are_answered_first(peer):
    def plan(job):
        job.cancel.wait()
        return job.stopped

    node = LifecycleNode("closing", context=peer.node.context)
    executor = SingleThreadedExecutor(context=peer.node.context)
    executor.add_node(node)
    worker = PlanWorker(plan, queue_size=8)
    parameters = SimpleNamespace(plan_timeout=30.0, service_depth=10, limits=limits())
    services = Services(node, LiveParameters(parameters), None, worker, None, None)
    client = peer.node.create_client(SaveSystemPrompt, "/closing/save_system_prompt")

    def call():
        return client.call_async(SaveSystemPrompt.Request(system_prompt=SYSTEM))

    def wait(condition, what):
        peer.wait(lambda: executor.spin_once(timeout_sec=0.05) or condition(), what)

    try:
        wait(client.service_is_ready, "service")
        calls = [call(), call()]
        wait(lambda: worker.pending == 2, "calls that wait")
        worker.close()
        services.destroy()
        wait(lambda: all(one.done() for one in calls), "answers")
        for one in calls:
            assert (one.result().success, one.result().message) == (False, "the node shuts down")
        wait(lambda: services._services[0] not in list(node.services), "end of the service")
    finally:
        worker.close()
        executor.shutdown()
        node.destroy_node()
