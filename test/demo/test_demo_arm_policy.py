# SPDX-License-Identifier: Apache-2.0
"""The demo's nodes with a policy of random weights for its arm, over topics."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("rclpy")
pytest.importorskip("edgellm_ros.msg")

import rclpy

from edgellm_ros.ros.processes import Child, own_domain, ros_environment
from edgellm_ros.ros.world_link import LinkError
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest
from edgellm_tabletop.episodes.controller import NANOSECONDS
from edgellm_tabletop.episodes.drivers import contract
from edgellm_tabletop.evaluation.task import export_policy
from edgellm_tabletop.ros.demo import DemoOptions, arm_arguments, node_arguments
from edgellm_tabletop.ros.tabletop_link import TabletopLink
from edgellm_tabletop.units import JOINTS
from edgellm_tabletop.world import IMAGE_SIZE, INSTRUCTIONS, REST
from fixtures.act_checkpoint import Robot, write_act

pytestmark = [pytest.mark.real_time, pytest.mark.timeout(600)]
STAMP = 10 * NANOSECONDS
INSTRUCTION = INSTRUCTIONS["left"]
IMAGE = np.random.default_rng(0).integers(0, 256, (IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Path:
    """The engine of a policy whose actions are near the rest position."""
    folder = tmp_path_factory.mktemp("arm")
    statistics = {
        "action.mean": contract().to_policy(np.array(REST)).astype(np.float32),
        "action.std": np.ones(len(JOINTS), np.float32),
        "observation.state.mean": np.zeros(len(JOINTS), np.float32),
        "observation.state.std": np.full(len(JOINTS), 50, np.float32),
    }
    robot = Robot({"front": (IMAGE_SIZE, IMAGE_SIZE)}, len(JOINTS), len(JOINTS))
    export_policy(write_act(folder / "act", 0, robot, statistics), folder / "engine", print)
    return folder / "engine"


def test_a_frame_and_joint_states_give_the_runtimes_chunk_and_the_arm_follows_it(engine, tmp_path):
    options = DemoOptions(1, 0, tmp_path, engine, engine)
    followed: list = []
    with ExitStack() as stack:
        domain = stack.enter_context(own_domain())
        for name, make in (("arm", arm_arguments), ("node", node_arguments)):
            child = Child(name, make(options), tmp_path / name, ros_environment(domain))
            stack.callback(child.stop)
        rclpy.init(domain_id=domain)
        stack.callback(rclpy.try_shutdown)
        world = TabletopLink(lambda *arguments: followed.append(arguments))
        stack.callback(world.destroy_node)
        world.publish_clock(STAMP)
        world.wait_until_ready(60.0)
        world.publish_joints(STAMP, np.array(REST))
        world.restart_arm()
        world.tick(STAMP + 1, np.array(REST))
        plan = world.ask(STAMP + 1, IMAGE, 3.0, 5, INSTRUCTION)
    state = contract().to_policy(np.array(REST))
    with LLMInferenceRuntime(engine) as runtime:
        expected = runtime.handle_request(LLMGenerationRequest(INSTRUCTION, images=(IMAGE,), state=state))
    np.testing.assert_array_equal(plan.targets, expected.actions[0])
    assert plan.refused == ""
    assert 0 < plan.node_seconds < plan.seconds
    now, times, positions, _ = followed[0]
    assert now == STAMP + 1
    assert abs(times[0] - now) < 1000
    np.testing.assert_allclose(positions[0], REST, atol=1e-9)
    away = np.abs(contract().to_ros(plan.targets.astype(np.float64)[-1]) - positions[-1])
    assert away.max() < 0.02


def test_a_frame_that_is_sent_again_comes_with_the_joint_states(monkeypatch):
    """Time stands still until the answer: nothing else repeats lost joint states."""
    sent = []
    with ExitStack() as stack:
        rclpy.init(domain_id=stack.enter_context(own_domain()))
        stack.callback(rclpy.try_shutdown)
        world = TabletopLink(print)
        stack.callback(world.destroy_node)
        world.publish_joints(STAMP, np.array(REST))
        monkeypatch.setattr(world._states, "publish", lambda message: sent.append("joints"))
        monkeypatch.setattr(world._image, "publish", lambda message: sent.append("frame"))
        with pytest.raises(LinkError, match="sent 2 times"):
            world.ask(STAMP, IMAGE, 0.05, 2)
    assert sent == ["frame", "joints", "frame"]
