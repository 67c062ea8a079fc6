# SPDX-License-Identifier: Apache-2.0
"""A Diffusion Policy in the node, whose plans take the observations of two times."""

from __future__ import annotations

import numpy as np
import pytest
from edgellm_ros.action import Plan

from edgellm_ros.runtime.request import LLMGenerationRequest
from fixtures.diffusion_checkpoint import CAMERAS, EXECUTED, write_diffusion
from fixtures.peer import image_message
from fixtures.policy_robot import JOINTS, NAMES, STATE, answer, export_policy, later, values

DT = 1.0  # of the policy, in s
OLD_TOP, TOP, OLD_WRIST, WRIST = (
    np.random.default_rng(i).integers(0, 256, (*CAMERAS["top"], 3), dtype=np.uint8) for i in range(4)
)
OLD_STATE = STATE - 0.5
OLD_JOINTS = {name: position - 0.5 for name, position in JOINTS.items()}
NOW = {"images": (TOP, WRIST), "state": STATE}
BOTH = {
    "images": (np.stack([OLD_TOP, TOP]), np.stack([OLD_WRIST, WRIST])),
    "state": np.stack([OLD_STATE, STATE]),
}


@pytest.fixture(scope="module")
def policy_engine(tmp_path_factory):
    """The engine of a Diffusion Policy, in place of that of a SmolVLA."""
    return export_policy(tmp_path_factory.mktemp("diffusion"), write_diffusion)


@pytest.fixture(autouse=True)
def robot(policy_node):
    """The robot, whose node has no input of earlier tests."""
    policy_node.restart()
    return policy_node


def send(robot, stamp, top=TOP, wrist=WRIST, joints=JOINTS):
    """Send frames and joints of one time; the frame on ~/image last."""
    robot.joints(stamp, joints)
    robot.further(stamp, wrist)
    robot.image(stamp, top)


def test_a_plan_takes_the_observations_that_are_an_action_apart(robot, peer, policy_runtime):
    stamp = peer.now()
    send(robot, later(stamp, -DT), OLD_TOP, OLD_WRIST, OLD_JOINTS)
    send(robot, later(stamp, -DT / 3), 255 - TOP, 255 - WRIST)  # between both times
    send(robot, stamp)
    chunk = robot.chunk()
    expected = answer(policy_runtime, **BOTH)
    np.testing.assert_array_equal(values(chunk), expected)
    assert np.abs(expected - answer(policy_runtime, **NOW)).max() > 1e-4
    assert (chunk.header.stamp, list(chunk.names), chunk.horizon) == (stamp, NAMES, EXECUTED)


def test_the_first_observation_is_repeated(robot, peer, policy_runtime):
    send(robot, peer.now())
    np.testing.assert_array_equal(robot.actions(), answer(policy_runtime, **NOW))


def test_every_frame_is_planned_with_the_one_before(robot, peer, policy_runtime):
    assert peer.set_parameter("plan_on", "image").successful
    try:
        stamp = later(peer.now(), -DT)
        send(robot, stamp, OLD_TOP, OLD_WRIST, OLD_JOINTS)
        peer.command("go")
        peer.wait(lambda: peer.received["action_chunk"], "first chunk")
        send(robot, later(stamp, 0.9 * DT))  # nearest to that is the first frame
        second = peer.wait(lambda: peer.received["action_chunk"][1:], "second chunk")[0]
    finally:
        assert peer.set_parameter("plan_on", "command").successful
    np.testing.assert_array_equal(values(second), answer(policy_runtime, **BOTH))


def test_a_goal_with_images_is_of_one_time(robot, peer, policy_runtime):
    robot.joints(later(peer.now(), -DT), OLD_JOINTS)
    stamp = peer.now()
    robot.joints(stamp)
    images = [image_message(TOP, stamp), image_message(WRIST, stamp)]
    result = peer.plan(Plan.Goal(images=images))
    assert (result.termination_reason, result.message) == (Plan.Result.COMPLETED, "")
    np.testing.assert_array_equal(values(result.action_chunks[0]), answer(policy_runtime, **NOW))


def test_a_goal_with_a_state_takes_frames_of_one_time(robot, peer, policy_runtime):
    stamp = peer.now()
    send(robot, later(stamp, -DT), OLD_TOP, OLD_WRIST, OLD_JOINTS)
    send(robot, stamp)
    result = peer.plan(Plan.Goal(state=STATE.tolist()))
    np.testing.assert_array_equal(values(result.action_chunks[0]), answer(policy_runtime, **NOW))


def test_frames_of_several_sizes_are_an_error(robot, peer):
    stamp = peer.now()
    send(robot, later(stamp, -DT), OLD_TOP[:40], OLD_WRIST, OLD_JOINTS)
    send(robot, stamp)
    reason, message = robot.refusal()
    assert reason == Plan.Result.ERROR
    expected = "camera top: the frames of a plan's observations have several sizes: 64 x 40, 64 x 48"
    assert message == expected


def test_goals_may_ask_for_several_chunks_and_other_steps(robot, peer, policy_runtime):
    send(robot, peer.now())
    asked = {"action_samples": 2, "denoise_steps": 3, "noise_seed": 5}
    result = peer.plan(Plan.Goal(**asked))
    expected = policy_runtime.handle_request(LLMGenerationRequest(**NOW, **asked))
    found = np.stack([values(chunk) for chunk in result.action_chunks])
    np.testing.assert_array_equal(found, expected.actions)


def test_chunks_that_continue_others_are_refused(peer):
    reply = peer.set_parameter("chunking", "guided")
    assert not reply.successful
    message = "chunking must be off: the actions of this engine (diffusion) come from no flow"
    assert message in reply.reason
