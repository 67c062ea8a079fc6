# SPDX-License-Identifier: Apache-2.0
"""The world's side of edgellm_arm, which a node here plays."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("rclpy")
pytest.importorskip("edgellm_ros.msg")

import rclpy
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue
from edgellm_ros.msg import ActionChunk
from sensor_msgs.msg import JointState
from trajectory_msgs.msg import JointTrajectory

from edgellm_ros.ros.arm.messages import to_trajectory
from edgellm_ros.ros.arm.motion import Motion, Profile
from edgellm_ros.ros.processes import own_domain
from edgellm_ros.ros.world_link import LinkError
from edgellm_tabletop.episodes.drivers import contract
from edgellm_tabletop.ros import tabletop_link

pytestmark = pytest.mark.real_time
STAMP = 7 * 10**9
TARGETS = np.zeros((3, 6), np.float32)


class PlayedArm:
    """Counts what it hears, and answers what it is told to."""

    def __init__(self, world: tabletop_link.TabletopLink) -> None:
        self.node = rclpy.create_node("edgellm_arm")
        world._executor.add_node(self.node)
        make = self.node.create_publisher
        self.states = make(JointState, "edgellm_arm/state", 10)
        self.diagnostics = make(DiagnosticArray, "/diagnostics", 10)
        self.trajectories = make(JointTrajectory, contract().controller.topic, 10)
        self.heard: list[JointState] = []
        self.answered = 0  # message of joint states that is answered
        self.refusals = 0  # in the counters
        self.refuses = False
        self.node.create_subscription(JointState, contract().state_topic, self.on_joints, 10)
        self.node.create_subscription(ActionChunk, tabletop_link.CHUNKS, self.on_chunk, 10)

    def on_joints(self, message: JointState) -> None:
        self.heard.append(message)
        if len(self.heard) == self.answered:
            self.states.publish(message)

    def on_chunk(self, message: ActionChunk) -> None:
        if self.refuses:
            self.refusals += 1
            self.report()
        else:
            positions, speeds = np.ones((2, 6)), np.zeros((2, 6))
            motion = Motion(0.0, 0.02, positions, speeds, Profile(positions, speeds))
            self.trajectories.publish(to_trajectory(motion, contract().ros_names, STAMP))

    def report(self) -> None:
        values = [KeyValue(key="chunks_too_far", value=str(self.refusals))]
        status = DiagnosticStatus(name="/edgellm_arm: arm", values=values)
        self.diagnostics.publish(DiagnosticArray(status=[status]))


@pytest.fixture
def pair():
    """The world, what it follows, and the arm's node."""
    followed: list = []
    with own_domain() as domain:
        rclpy.init(domain_id=domain)
        world = tabletop_link.TabletopLink(lambda *arguments: followed.append(arguments))
        world.make_chunks()
        arm = PlayedArm(world)
        publishers = world._states, world._chunks, arm.states, arm.diagnostics, arm.trajectories
        # Each node has a subscription of the chunks.
        assert world.spin_until(lambda: all(each.get_subscription_count() for each in publishers), 20)
        assert world.spin_until(lambda: world._chunks.get_subscription_count() == 2, 20)
        yield world, followed, arm
        world.destroy_node()
        arm.node.destroy_node()
        rclpy.shutdown()


def test_time_goes_on_when_the_arm_has_answered_and_joint_states_are_repeated(pair, monkeypatch):
    world, _, arm = pair
    monkeypatch.setattr(tabletop_link, "ATTEMPT_S", 0.3)
    arm.answered = 2
    world.tick(STAMP, np.arange(6.0))
    assert len(arm.heard) == 2
    assert list(arm.heard[0].name) == list(contract().ros_names)
    assert list(arm.heard[0].position) == list(range(6))
    monkeypatch.setattr(tabletop_link, "ATTEMPTS", 2)
    with pytest.raises(LinkError, match=r"no answer from edgellm_arm to the joint states of t = 8\.00 s"):
        world.tick(STAMP + 10**9, np.zeros(6))


def test_a_chunk_is_answered_by_a_trajectory_or_by_a_counter_of_refusals(pair):
    world, followed, arm = pair
    world.publish_joints(STAMP, np.zeros(6))
    plan = world.give(STAMP, TARGETS, 10.0, 2)
    assert (plan.refused, plan.targets.shape) == ("", (3, 6))
    ((now, times, positions, _),) = followed
    assert (now, times[1] - times[0], positions[0, 0]) == (STAMP, 20 * 10**6, 1.0)
    arm.refuses = True
    for _ in range(2):  # a refusal counts for its own chunk only
        assert world.give(STAMP + 10**9, TARGETS, 10.0, 2).refused == "too_far"
    arm.refuses = False
    arm.report()
    assert world.give(STAMP + 2 * 10**9, TARGETS, 10.0, 2).refused == ""


def test_an_arm_that_does_nothing_with_a_chunk_ends_the_episode(pair):
    world, _, arm = pair
    for subscription in list(arm.node.subscriptions):
        if subscription.topic.endswith("action_chunk"):
            arm.node.destroy_subscription(subscription)
    with pytest.raises(LinkError, match=r"to the frame of t = 7\.0 s, sent 2 times"):
        world.give(STAMP, TARGETS, 0.3, 2)
