# SPDX-License-Identifier: Apache-2.0
"""A SmolVLA in the node: its chunks of actions equal the runtime's own answers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from edgellm_ros.action import Plan
from edgellm_ros.msg import ChatMessage, PreviousChunk
from edgellm_ros.srv import ListLoras, SaveSystemPrompt
from sensor_msgs.msg import Image, JointState
from trajectory_msgs.msg import JointTrajectory

from edgellm_ros.diffusion.chunking import ChunkCondition
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.ros.arm.contract import check_policy, read_contract
from edgellm_ros.ros.chunk_checks import RefusedChunkError
from edgellm_ros.ros.follower.course import read_chunk
from edgellm_ros.ros.node.planning.chunking import shifted
from edgellm_ros.ros.processes import ARM_MODULE, Child, ros_environment
from edgellm_ros.runtime.request import LLMGenerationRequest
from fixtures.peer import image_message
from fixtures.policy_robot import NAMES, STATE, STATE_JOINTS, TASK, TOP, WRIST, answer, later, values
from fixtures.smolvla_checkpoint import ACTIONS, HORIZON

R = Plan.Result


@pytest.fixture(autouse=True)
def robot(policy_node):
    """The robot, whose node has no input of earlier tests."""
    policy_node.restart()
    return policy_node


def test_a_command_gives_the_chunk_that_the_runtime_gives_for_the_same_inputs(robot, peer, policy_runtime):
    stamp = robot.all_inputs()
    np.testing.assert_array_equal(robot.actions(), answer(policy_runtime))
    (chunk,) = peer.received["action_chunk"]
    assert (list(chunk.names), list(chunk.units)) == (NAMES, [""] * ACTIONS)
    assert (chunk.dt, chunk.horizon) == (1.0, HORIZON)
    assert chunk.header.stamp == stamp
    assert chunk.header.frame_id == "base_link"
    (generation,) = peer.wait(lambda: peer.received["generation"], "generation")
    assert (generation.text, generation.action_chunk_count) == ("", 1)
    assert generation.request_id == chunk.request_id
    peer.listen(0.2)
    assert not peer.received["path"]


def test_the_follower_of_a_base_refuses_the_chunk_and_names_the_columns(robot):
    robot.all_inputs()
    chunk = robot.chunk()
    with pytest.raises(RefusedChunkError, match=r"joint_0\.pos.*a unicycle takes acceleration, curvature"):
        read_chunk(
            0,
            request_id="1",
            dt=chunk.dt,
            horizon=chunk.horizon,
            names=chunk.names,
            units=chunk.units,
            values=chunk.values,
        )


def test_a_goal_without_images_is_planned_with_the_topics(robot, peer, policy_runtime):
    robot.all_inputs()
    result = peer.plan(Plan.Goal(prompt=TASK, noise_seed=5))
    assert (result.termination_reason, result.message) == (R.COMPLETED, "")
    assert not result.paths
    np.testing.assert_array_equal(values(result.action_chunks[0]), answer(policy_runtime, noise_seed=5))


def test_a_goal_may_have_state_and_images(robot, peer, policy_runtime):
    """They win over the topics."""
    robot.joints(peer.now())
    images = [image_message(TOP), image_message(WRIST)]
    result = peer.plan(Plan.Goal(prompt=TASK, images=images, state=[1.0, 2.0, 3.0], action_samples=2))
    assert (result.termination_reason, result.message) == (R.COMPLETED, "")
    request = LLMGenerationRequest(
        TASK, images=(TOP, WRIST), state=np.array([1.0, 2.0, 3.0]), action_samples=2
    )
    found = np.stack([values(chunk) for chunk in result.action_chunks])
    np.testing.assert_array_equal(found, policy_runtime.handle_request(request).actions)


def test_images_of_a_goal_are_planned_with_the_newest_joint_state(robot, peer, policy_runtime):
    robot.joints(peer.now())
    result = peer.plan(Plan.Goal(prompt=TASK, images=[image_message(TOP), image_message(WRIST)]))
    np.testing.assert_array_equal(values(result.action_chunks[0]), answer(policy_runtime))


@pytest.mark.parametrize(
    ("goal", "message"),
    [
        ({"state": [1.0, 2.0]}, "state must have shape [3] (state_0, state_1, state_2), got [2]"),
        ({"state": [0.0, math.inf, 0.0]}, "state has a value that is not finite: state_1"),
        (
            {"images": [image_message(TOP)], "state": [0.0] * 3},
            "the goal has 1 images, expected one of each camera: top, wrist (parameter cameras)",
        ),
        (
            {"images": [image_message(TOP), Image(encoding="rgb8")], "state": [0.0] * 3},
            "camera wrist: image is empty: 0 x 0 pixels",
        ),
        ({"state": [0.0] * 3, "system_prompt": "be kind"}, "this engine is a policy, the request has system"),
        (
            {"state": [0.0] * 3, "earlier_messages": [ChatMessage(role="user", text="hi")]},
            "a goal with earlier_messages needs an engine that answers with text; this one is a policy",
        ),
        ({"state": [0.0] * 3, "lora": "careful"}, "this engine is a policy, the request has lora"),
    ],
)
def test_goals_that_do_not_fit_the_policy_are_errors(robot, goal, message):
    goal = {"images": [image_message(TOP), image_message(WRIST)], **goal}
    reason, found = robot.refusal(**goal)
    assert reason == R.ERROR
    assert found.startswith(message)


def test_services_of_language_models_say_that_it_is_a_policy(peer):
    assert not peer.call(ListLoras, "list_loras").names
    reply = peer.call(SaveSystemPrompt, "save_system_prompt", system_prompt="be kind")
    assert (reply.success, "the engine is a policy (smolvla)" in reply.message) == (False, True)


def test_a_goal_continues_the_chunk_that_it_names(peer, policy_runtime):
    goal = Plan.Goal(prompt=TASK, images=[image_message(TOP), image_message(WRIST)], state=STATE.tolist())
    first = peer.plan(goal).action_chunks[0]
    goal.noise_seed = 1
    goal.previous_chunk = [PreviousChunk(form="frozen", chunk=first, executed=1, delay=2)]
    second = values(peer.plan(goal).action_chunks[0])
    condition = ChunkCondition(actions=values(first), executed=1, delay=2, form="frozen")
    np.testing.assert_array_equal(second, answer(policy_runtime, noise_seed=1, previous_chunk=condition))
    np.testing.assert_array_equal(second[:2], values(first)[1:3])


def test_every_frame_continues_the_last_chunk_with_chunking(robot, peer, policy_runtime):
    stamp, before = peer.now(), peer.metrics()["chunks_continued"]
    for name, value in (("chunking", "guided"), ("plan_on", "image")):
        assert peer.set_parameter(name, value).successful
    try:
        for seconds in (0.0, 0.1):
            robot.joints(later(stamp, seconds))
        robot.further(stamp)
        robot.image(stamp)
        first = robot.actions()
        delay = int(peer.metrics()["chunk_delay"])
        robot.image(later(stamp, 0.1))  # 0.1 actions later
        second = values(peer.wait(lambda: peer.received["action_chunk"][1:], "second chunk")[0])
        assert peer.metrics()["chunks_continued"] == before + 1
    finally:
        for name, value in (("chunking", "off"), ("plan_on", "command")):
            assert peer.set_parameter(name, value).successful
    np.testing.assert_array_equal(first, answer(policy_runtime))
    condition = ChunkCondition(
        actions=shifted(first, 0.1), executed=0, delay=delay, form="guided", horizon=min(2 * delay, HORIZON)
    )
    np.testing.assert_allclose(second, answer(policy_runtime, previous_chunk=condition), atol=1e-5)
    assert np.abs(second - first).max() > 1e-3


def test_the_arm_node_makes_a_trajectory_of_the_chunk_of_the_policy(
    robot, peer, domain, tmp_path, policy_engine
):
    limits = "{position: [-1000, 1000], speed: 1, acceleration: 10, jerk: 1000, deviation: 1000}"
    joints = [
        f"{{policy: {name}, ros: arm_{i}, unit: degrees, limits: {limits}}}" for i, name in enumerate(NAMES)
    ]
    (tmp_path / "arm.yaml").write_text(
        "{rate: 50, controller: {kind: joint_trajectory, topic: /commands}, state_topic: /arm_states, "
        f"cameras: [{{policy: top, topic: /top}}], joints: [{', '.join(joints)}]}}"
    )
    contract = read_contract(tmp_path / "arm.yaml")
    # The states of this test's policy have other names than its actions.
    with pytest.raises(ValueError, match="state: "):
        check_policy(contract, EngineConfig.load(policy_engine).policy)
    values_of = {"autostart": "true", "contract": tmp_path / "arm.yaml", "max_chunk_age": "5.0"}
    arguments = [argument for name, value in values_of.items() for argument in ("-p", f"{name}:={value}")]
    arguments += ["-r", "~/action_chunk:=/edgellm/action_chunk"]
    heard: list[JointTrajectory] = []
    subscription = peer.node.create_subscription(JointTrajectory, "/edgellm_arm/preview", heard.append, 10)
    states = peer.node.create_publisher(JointState, "/arm_states", 10)
    child = Child(
        "arm", ["-m", ARM_MODULE, "--ros-args", *arguments], tmp_path / "log", ros_environment(domain)
    )

    def is_followed() -> bool:  # the first chunks may come before the arm has discovered the node
        stamp = peer.now()
        states.publish(JointState(name=list(contract.ros_names), position=[0.5] * ACTIONS))
        robot.joints(stamp)
        robot.further(stamp)
        robot.image(stamp)
        robot.actions()
        peer.listen(0.3)
        return bool(heard)

    try:
        peer.wait(is_followed, "trajectory of the arm")
    finally:
        child.stop()
        peer.node.destroy_subscription(subscription)
        peer.node.destroy_publisher(states)
    assert tuple(heard[0].joint_names) == contract.ros_names
    assert list(heard[0].points[0].positions) == [0.5] * ACTIONS
    last = np.array(heard[0].points[-1].positions)
    rows = contract.to_ros(values(peer.received["action_chunk"][0]))
    aims = np.sign(rows[:4].mean(0) - 0.5)
    assert (np.sign(last - 0.5) == aims).all()


class TestAnotherRobot:
    """Parameters that can only change while the node is unconfigured."""

    @pytest.fixture
    def configure(self, peer):
        """`configure(cameras=[...])`: whether the node takes the parameters.

        The parameters are set back at the end.
        """
        before = {"cameras": [""], "state_joints": STATE_JOINTS}

        def run(**parameters: list[str]) -> bool:
            if peer.state() == "active":
                assert peer.transition("deactivate")
            if peer.state() == "inactive":
                assert peer.transition("cleanup")
            for name, value in parameters.items():
                assert peer.set_parameter(name, value).successful
            if not peer.transition("configure"):
                return False
            assert peer.transition("activate")
            peer.connect()
            return True

        yield run
        assert run(**before)

    def test_has_only_one_of_the_cameras(self, robot, peer, policy_runtime, configure):
        assert configure(cameras=["wrist"])
        stamp = peer.now()
        robot.joints(stamp)
        robot.image(stamp, WRIST)  # ~/image is that of the first of the cameras
        np.testing.assert_array_equal(
            robot.actions(), answer(policy_runtime, images=(WRIST,), cameras=("wrist",))
        )

    def test_has_its_cameras_in_another_order(self, robot, peer, policy_runtime, configure):
        assert configure(cameras=["wrist", "top"])
        stamp = peer.now()
        robot.joints(stamp)
        robot.further(stamp, TOP, "top")
        robot.image(stamp, WRIST)
        np.testing.assert_array_equal(robot.actions(), answer(policy_runtime))

    def test_has_joints_that_are_named_as_the_state_of_the_policy(
        self, robot, peer, policy_runtime, configure
    ):
        assert configure(state_joints=[""])
        stamp = peer.now()
        robot.joints(stamp, {f"state_{i}": value for i, value in enumerate(STATE.tolist())})
        robot.further(stamp)
        robot.image(stamp)
        np.testing.assert_array_equal(robot.actions(), answer(policy_runtime))

    def test_does_not_fit_the_policy(self, peer, configure):
        assert not configure(state_joints=["pan", "lift"])
        message = "parameter state_joints must be 3 different joints, for state_0, state_1, state_2, got 'pan"
        assert message in peer.status("engine").message
