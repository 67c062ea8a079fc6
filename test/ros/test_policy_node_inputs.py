# SPDX-License-Identifier: Apache-2.0
"""State and frames of a policy's plan from the topics, and errors without them."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from edgellm_ros.action import Plan
from rclpy.qos import ReliabilityPolicy

from fixtures.policy_robot import JOINTS, WRIST, answer, later

R = Plan.Result


@pytest.fixture(autouse=True)
def robot(policy_node):
    """The robot, whose node has no input of earlier tests."""
    policy_node.restart()
    return policy_node


def test_the_qos_of_the_topics_is_that_of_other_inputs_and_can_be_overridden(peer):
    for topic, expected in (
        ("wrist/image", ReliabilityPolicy.RELIABLE),
        ("joint_states", ReliabilityPolicy.BEST_EFFORT),
    ):
        name = f"/edgellm/{topic}"
        peer.wait(lambda name=name: peer.node.count_subscribers(name) == 1, f"subscription to {topic}")
        (subscription,) = peer.node.get_subscriptions_info_by_topic(name)
        assert subscription.qos_profile.reliability == expected


def test_the_state_is_the_one_nearest_to_the_frame(robot, peer, policy_runtime):
    stamp = peer.now()
    for seconds, pan in ((-0.3, 7.0), (-0.02, 0.5), (0.05, 8.0)):
        robot.joints(later(stamp, seconds), {**JOINTS, "pan": pan})
    robot.further(stamp)
    robot.image(stamp)
    np.testing.assert_array_equal(robot.actions(), answer(policy_runtime, state=np.array([0.5, -1.0, 2.0])))


def test_a_plan_takes_the_frame_of_each_camera_that_is_nearest_to_its_own(robot, peer, policy_runtime):
    stamp = peer.now()
    robot.joints(stamp)
    robot.further(later(stamp, -0.1), 255 - WRIST)
    robot.further(later(stamp, 0.01))
    robot.further(later(stamp, 0.05), 255 - WRIST)
    robot.image(stamp)
    np.testing.assert_array_equal(robot.actions(), answer(policy_runtime))


def test_a_missing_state_is_named_and_the_node_goes_on(robot, peer, policy_runtime):
    stamp, before = peer.now(), peer.metrics()["joint_states_incomplete"]
    robot.further(stamp)
    robot.image(stamp)
    reason, message = robot.refusal()
    assert reason == R.STALE_INPUT
    assert "no joint state with pan, grip, lift (parameter state_joints) has arrived on ~/joint_st" in message
    robot.joints(stamp, {"pan": 0.3, "lift": 2.0})
    assert robot.refusal()[1].endswith("on ~/joint_states; the newest message lacks 'grip'")
    assert peer.metrics()["joint_states_incomplete"] == before + 1
    robot.joints(stamp)
    np.testing.assert_array_equal(robot.actions(), answer(policy_runtime))


def test_incomplete_messages_of_other_parts_of_the_robot_do_no_harm(robot, peer, policy_runtime):
    stamp = peer.now()
    robot.joints(stamp)
    robot.joints(stamp, {"wheel": 1.0})
    robot.further(stamp)
    robot.image(stamp)
    np.testing.assert_array_equal(robot.actions(), answer(policy_runtime))


def test_a_state_that_ended_before_the_frame_is_stale(robot, peer):
    stamp = peer.now()
    assert peer.set_parameter("max_input_age", 5.0).successful
    try:
        robot.joints(later(stamp, -6.0))
        robot.further(later(stamp, 0.3))
        robot.image(later(stamp, 0.3))
        reason, message = robot.refusal()
    finally:
        assert peer.set_parameter("max_input_age", 30.0).successful
    assert reason == R.STALE_INPUT
    assert "the newest joint state is 6.30 s older than the frame, limit 5 s" in message


def test_a_position_that_is_not_finite_is_refused_until_a_good_one_comes(robot, peer, policy_runtime):
    stamp = peer.now()
    robot.further(stamp)
    robot.image(stamp)
    robot.joints(later(stamp, -0.01), {**JOINTS, "grip": math.nan})
    assert robot.refusal() == (R.ERROR, "a joint state is not finite: the position of 'grip' is nan")
    assert "the position of 'grip' is nan" in peer.status("inputs").message
    robot.joints(stamp)
    np.testing.assert_array_equal(robot.actions(), answer(policy_runtime))


def test_a_missing_camera_is_named_with_its_topic(robot, peer):
    stamp = peer.now()
    robot.joints(stamp)
    robot.image(stamp)
    reason, message = robot.refusal()
    assert reason == R.STALE_INPUT
    assert message == "no frame of the camera 'wrist' has arrived on ~/wrist/image (parameter cameras)"
    assert "no frame of the camera wrist so far" in peer.status("inputs").message


def test_inputs_that_stopped_are_on_diagnostics(robot, peer):
    stamp = peer.now()
    robot.joints(stamp)
    robot.further(stamp)
    assert peer.set_parameter("max_input_age", 0.5).successful
    try:
        peer.listen(0.6)
        message = peer.status("inputs").message
    finally:
        assert peer.set_parameter("max_input_age", 30.0).successful
    assert re.search(r"no frame of the camera wrist for \d+\.\d s", message)
    assert re.search(r"no joint state with all of state_joints for \d+\.\d s", message)


@pytest.mark.parametrize(("seconds", "words"), [(-0.5, "0.50 s older"), (0.3, "0.30 s newer")])
def test_frames_that_are_too_far_apart_are_stale(robot, peer, seconds, words):
    stamp = peer.now()
    robot.joints(stamp)
    robot.further(later(stamp, seconds))
    robot.image(stamp)
    reason, message = robot.refusal()
    assert reason == R.STALE_INPUT
    assert message.startswith(f"the frame of the camera 'wrist' is {words} than that on ~/image, limit 0.2 s")
