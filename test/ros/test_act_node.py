# SPDX-License-Identifier: Apache-2.0
"""An ACT in the node: its chunks of actions equal the runtime's own answers."""

from __future__ import annotations

import numpy as np
import pytest
from edgellm_ros.action import Plan

from fixtures.act_checkpoint import write_act
from fixtures.peer import image_message
from fixtures.policy_robot import NAMES, STATE, TASK, TOP, WRIST, answer, export_policy, later, values


@pytest.fixture(scope="module")
def policy_engine(tmp_path_factory):
    """The engine of an ACT, in place of that of a SmolVLA."""
    return export_policy(tmp_path_factory.mktemp("act"), write_act)


@pytest.fixture(autouse=True)
def robot(policy_node):
    """The robot, whose node has no input of earlier tests."""
    policy_node.restart()
    return policy_node


def test_a_command_gives_the_chunk_that_the_runtime_gives_for_the_same_inputs(robot, peer, policy_runtime):
    stamp = robot.all_inputs()
    np.testing.assert_array_equal(robot.actions(), answer(policy_runtime))
    (chunk,) = peer.received["action_chunk"]
    assert (list(chunk.names), chunk.header.stamp) == (NAMES, stamp)


def test_a_goal_may_have_state_and_images_and_needs_no_prompt(peer, policy_runtime):
    images = [image_message(TOP), image_message(WRIST)]
    result = peer.plan(Plan.Goal(images=images, state=(STATE + 1).tolist()))
    assert (result.termination_reason, result.message) == (Plan.Result.COMPLETED, "")
    found = values(result.action_chunks[0])
    np.testing.assert_array_equal(found, answer(policy_runtime, state=STATE + 1))
    assert np.abs(found - answer(policy_runtime)).max() > 1e-5


def test_every_frame_gives_a_chunk(robot, peer, policy_runtime):
    assert peer.set_parameter("plan_on", "image").successful
    try:
        stamp = peer.now()
        robot.joints(stamp)
        robot.further(stamp)
        robot.image(stamp)
        peer.command(TASK)
        peer.wait(lambda: peer.received["action_chunk"], "first chunk")
        robot.image(later(stamp, 0.1), 255 - TOP)
        second = peer.wait(lambda: peer.received["action_chunk"][1:], "second chunk")[0]
    finally:
        assert peer.set_parameter("plan_on", "command").successful
    np.testing.assert_array_equal(values(second), answer(policy_runtime, images=(255 - TOP, WRIST)))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("chunking", "guided", "chunking must be off: the actions of this engine (act) come from no flow"),
        ("action_samples", 2, "action_samples must be from 0 to 1, max_action_samples of the engine, got 2"),
    ],
)
def test_parameters_of_a_flow_are_refused(peer, name, value, message):
    reply = peer.set_parameter(name, value)
    assert not reply.successful
    assert message in reply.reason


def test_a_goal_without_all_cameras_is_an_error(robot):
    reason, message = robot.refusal(images=[image_message(TOP)], state=STATE.tolist())
    assert reason == Plan.Result.ERROR
    assert message.startswith("the goal has 1 images, expected one of each camera: top, wrist")
