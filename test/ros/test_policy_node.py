# SPDX-License-Identifier: Apache-2.0
"""A SmolVLA in the node: state and cameras in, chunks of actions out, equal to the runtime's own answer."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import numpy as np
import pytest
from builtin_interfaces.msg import Time
from edgellm_ros.action import Plan
from edgellm_ros.msg import ChatMessage, PreviousChunk
from edgellm_ros.srv import ListLoras, SaveSystemPrompt
from rclpy.qos import ReliabilityPolicy
from sensor_msgs.msg import Image
from std_msgs.msg import Float64MultiArray

from edgellm_ros.builder import export
from edgellm_ros.diffusion.chunking import ChunkCondition
from edgellm_ros.ros.follower.course import RefusedChunkError, read_chunk
from edgellm_ros.ros.node.chunking import shifted
from edgellm_ros.ros.processes import Child, ros_environment
from edgellm_ros.ros.replay.replay import Replay, ReplayOptions
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest
from fixtures.peer import image_message
from fixtures.smolvla_checkpoint import ACTIONS, CAMERAS, HORIZON, write_smolvla
from fixtures.tiny_checkpoint import write_json

R = Plan.Result
ARM = Path(__file__).parents[2] / "examples" / "arm_on_a_robot.py"
ARENA_BAG = Path(__file__).parents[2] / "bags" / "arena"
TOP, WRIST = (
    np.random.default_rng(i).integers(0, 256, (*size, 3), dtype=np.uint8)
    for i, size in enumerate(CAMERAS.values())
)
JOINTS = {"lift": 2.0, "wheel": 9.0, "pan": 0.3, "grip": -1.0}  # as the robot publishes them
STATE = np.array([0.3, -1.0, 2.0])  # pan, grip, lift: the parameter state_joints
NAMES = [f"joint_{i}.pos" for i in range(ACTIONS)]
TASK = "pick it up"
SECOND = 10**9


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """A policy whose data set has one action per second, so that plans are faster than actions."""
    folder = tmp_path_factory.mktemp("policy")
    (folder / "meta").mkdir()
    write_json(folder / "meta" / "info.json", {"fps": 1, "features": {"action": {"names": NAMES}}})
    export(write_smolvla(folder / "checkpoint"), folder / "engine", dataset=folder / "meta")
    return folder / "engine"


@pytest.fixture(scope="module")
def runtime(engine, runtime_device):
    with LLMInferenceRuntime(engine, runtime_device) as runtime:
        yield runtime


@pytest.fixture(scope="module", autouse=True)
def node(start_node, peer, engine):
    child = start_node(
        engine_dir=engine, autostart="true", state_joints="[pan, grip, lift]", max_input_age=30.0,
        plan_timeout=30.0, input_reliability="reliable",
        **{"qos_overrides./edgellm/joint_states.subscription.reliability": "best_effort"},
    )  # fmt: skip
    peer.connect()
    return child


@pytest.fixture(autouse=True)
def fresh(peer, node):
    """Drop input of earlier tests."""
    assert peer.transition("deactivate")
    assert peer.transition("activate")
    peer.connect()
    peer.clear()


def later(stamp: Time, seconds: float) -> Time:
    time = stamp.sec * SECOND + stamp.nanosec + round(seconds * SECOND)
    return Time(sec=time // SECOND, nanosec=time % SECOND)


def sent(peer, counter: str, publish, *args, **kwargs) -> None:
    """Publish a message and wait until the node has it."""
    before = peer.metrics()[counter]
    publish(*args, **kwargs)
    peer.wait(lambda: peer.metrics()[counter] > before, counter)


def joints(peer, stamp: Time, positions: dict[str, float] = JOINTS) -> None:
    sent(peer, "joint_states_received", peer.joint_state, positions, stamp)


def wrist(peer, stamp: Time, pixels: np.ndarray = WRIST) -> None:
    sent(peer, "further_frames_received", peer.frame, pixels, stamp, "wrist/image")


def top(peer, stamp: Time, pixels: np.ndarray = TOP) -> None:
    sent(peer, "frames_received", peer.frame, pixels, stamp)


def expected(runtime, **changes) -> np.ndarray:
    """The runtime's own chunk [T, A]."""
    request = LLMGenerationRequest(TASK, images=(TOP, WRIST), state=STATE)
    return runtime.handle_request(dataclasses.replace(request, **changes)).actions[0]


def values(chunk) -> np.ndarray:
    return np.array(chunk.values, np.float32).reshape(chunk.horizon, len(chunk.names))


def commanded(peer) -> np.ndarray:
    """The chunk of a command."""
    peer.command(TASK)
    return values(peer.wait(lambda: peer.received["action_chunk"], "chunk")[0])


def refusal(peer, **goal) -> tuple[str, str]:
    """How a goal without an answer ends."""
    result = peer.plan(Plan.Goal(prompt=TASK, **goal))
    assert not result.action_chunks
    return result.termination_reason, result.message


def test_a_command_gives_the_chunk_that_the_runtime_gives_for_the_same_inputs(peer, runtime):
    stamp = peer.now()
    joints(peer, stamp)
    wrist(peer, stamp)
    top(peer, stamp)
    np.testing.assert_array_equal(commanded(peer), expected(runtime))
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


def test_the_qos_of_the_topics_is_that_of_other_inputs_and_can_be_overridden(peer):
    for topic, expected in (
        ("wrist/image", ReliabilityPolicy.RELIABLE),
        ("joint_states", ReliabilityPolicy.BEST_EFFORT),
    ):
        name = f"/edgellm/{topic}"
        peer.wait(lambda name=name: peer.node.count_subscribers(name) == 1, f"subscription to {topic}")
        (subscription,) = peer.node.get_subscriptions_info_by_topic(name)
        assert subscription.qos_profile.reliability == expected


def test_the_follower_of_a_base_refuses_the_chunk_and_names_the_columns(peer, runtime):
    stamp = peer.now()
    joints(peer, stamp)
    wrist(peer, stamp)
    top(peer, stamp)
    commanded(peer)
    (chunk,) = peer.received["action_chunk"]
    with pytest.raises(RefusedChunkError, match=r"joint_0\.pos.*a unicycle takes acceleration, curvature"):
        read_chunk(0, "1", chunk.dt, chunk.horizon, chunk.names, chunk.units, chunk.values)


def test_the_state_is_the_one_nearest_to_the_frame(peer, runtime):
    stamp = peer.now()
    for seconds, pan in ((-0.3, 7.0), (-0.02, 0.5), (0.05, 8.0)):
        joints(peer, later(stamp, seconds), {**JOINTS, "pan": pan})
    wrist(peer, stamp)
    top(peer, stamp)
    np.testing.assert_array_equal(commanded(peer), expected(runtime, state=np.array([0.5, -1.0, 2.0])))


def test_a_plan_takes_the_frame_of_each_camera_that_is_nearest_to_its_own(peer, runtime):
    stamp = peer.now()
    joints(peer, stamp)
    wrist(peer, later(stamp, -0.1), 255 - WRIST)
    wrist(peer, later(stamp, 0.01))
    wrist(peer, later(stamp, 0.05), 255 - WRIST)
    top(peer, stamp)
    np.testing.assert_array_equal(commanded(peer), expected(runtime))


def test_a_goal_without_images_is_planned_with_the_topics(peer, runtime):
    stamp = peer.now()
    joints(peer, stamp)
    wrist(peer, stamp)
    top(peer, stamp)
    result = peer.plan(Plan.Goal(prompt=TASK, noise_seed=5))
    assert (result.termination_reason, result.message) == (R.COMPLETED, "")
    assert not result.paths
    np.testing.assert_array_equal(values(result.action_chunks[0]), expected(runtime, noise_seed=5))


def test_a_goal_may_have_state_and_images(peer, runtime):
    """They win over the topics."""
    joints(peer, peer.now())
    images = [image_message(TOP), image_message(WRIST)]
    result = peer.plan(Plan.Goal(prompt=TASK, images=images, state=[1.0, 2.0, 3.0], action_samples=2))
    assert (result.termination_reason, result.message) == (R.COMPLETED, "")
    request = LLMGenerationRequest(
        TASK, images=(TOP, WRIST), state=np.array([1.0, 2.0, 3.0]), action_samples=2
    )
    found = np.stack([values(chunk) for chunk in result.action_chunks])
    np.testing.assert_array_equal(found, runtime.handle_request(request).actions)


def test_images_of_a_goal_are_planned_with_the_newest_joint_state(peer, runtime):
    joints(peer, peer.now())
    result = peer.plan(Plan.Goal(prompt=TASK, images=[image_message(TOP), image_message(WRIST)]))
    np.testing.assert_array_equal(values(result.action_chunks[0]), expected(runtime))


def test_a_missing_state_is_named_and_the_node_goes_on(peer, runtime):
    stamp = peer.now()
    wrist(peer, stamp)
    top(peer, stamp)
    reason, message = refusal(peer)
    assert reason == R.STALE_INPUT
    assert "no joint state with pan, grip, lift (parameter state_joints) has arrived on ~/joint_st" in message
    joints(peer, stamp, {"pan": 0.3, "lift": 2.0})
    assert refusal(peer)[1].endswith("on ~/joint_states; the newest message lacks 'grip'")
    assert peer.metrics()["joint_states_incomplete"] == 1
    joints(peer, stamp)
    np.testing.assert_array_equal(commanded(peer), expected(runtime))


def test_incomplete_messages_of_other_parts_of_the_robot_do_no_harm(peer, runtime):
    stamp = peer.now()
    joints(peer, stamp)
    joints(peer, stamp, {"wheel": 1.0})
    wrist(peer, stamp)
    top(peer, stamp)
    np.testing.assert_array_equal(commanded(peer), expected(runtime))


def test_a_state_that_ended_before_the_frame_is_stale(peer):
    stamp = peer.now()
    assert peer.set_parameter("max_input_age", 1.0).successful
    try:
        joints(peer, later(stamp, -5.0))
        wrist(peer, later(stamp, 0.3))
        top(peer, later(stamp, 0.3))
        reason, message = refusal(peer)
    finally:
        assert peer.set_parameter("max_input_age", 30.0).successful
    assert reason == R.STALE_INPUT
    assert "the newest joint state is 5.30 s older than the frame, limit 1 s" in message


def test_a_position_that_is_not_finite_is_refused_until_a_good_one_comes(peer, runtime):
    stamp = peer.now()
    wrist(peer, stamp)
    top(peer, stamp)
    joints(peer, later(stamp, -0.01), {**JOINTS, "grip": math.nan})
    assert refusal(peer) == (R.ERROR, "a joint state is not finite: the position of 'grip' is nan")
    assert "the position of 'grip' is nan" in peer.status("inputs").message
    joints(peer, stamp)
    np.testing.assert_array_equal(commanded(peer), expected(runtime))


def test_a_missing_camera_is_named_with_its_topic(peer):
    stamp = peer.now()
    joints(peer, stamp)
    top(peer, stamp)
    reason, message = refusal(peer)
    assert reason == R.STALE_INPUT
    assert message == "no frame of the camera 'wrist' has arrived on ~/wrist/image (parameter cameras)"
    assert "no frame of the camera wrist so far" in peer.status("inputs").message


def test_inputs_that_stopped_are_on_diagnostics(peer):
    stamp = peer.now()
    joints(peer, stamp)
    wrist(peer, stamp)
    assert peer.set_parameter("max_input_age", 0.5).successful
    try:
        peer.listen(0.6)
        message = peer.status("inputs").message
    finally:
        assert peer.set_parameter("max_input_age", 30.0).successful
    assert re.search(r"no frame of the camera wrist for \d+\.\d s", message)
    assert re.search(r"no joint state with all of state_joints for \d+\.\d s", message)


@pytest.mark.parametrize(("seconds", "words"), [(-0.5, "0.50 s older"), (0.3, "0.30 s newer")])
def test_frames_that_are_too_far_apart_are_stale(peer, seconds, words):
    stamp = peer.now()
    joints(peer, stamp)
    wrist(peer, later(stamp, seconds))
    top(peer, stamp)
    reason, message = refusal(peer)
    assert reason == R.STALE_INPUT
    assert message.startswith(f"the frame of the camera 'wrist' is {words} than that on ~/image, limit 0.2 s")


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
            "this engine is a policy, the goal has earlier_messages",
        ),
        ({"state": [0.0] * 3, "lora": "careful"}, "this engine is a policy, the request has lora"),
    ],
)
def test_goals_that_do_not_fit_the_policy_are_errors(peer, goal, message):
    goal = {"images": [image_message(TOP), image_message(WRIST)], **goal}
    reason, found = refusal(peer, **goal)
    assert reason == R.ERROR
    assert found.startswith(message)


def test_services_of_language_models_say_that_it_is_a_policy(peer):
    assert not peer.call(ListLoras, "list_loras").names
    answer = peer.call(SaveSystemPrompt, "save_system_prompt", system_prompt="be kind")
    assert (answer.success, "the engine is a policy (smolvla)" in answer.message) == (False, True)


def test_a_goal_continues_the_chunk_that_it_names(peer, runtime):
    goal = Plan.Goal(prompt=TASK, images=[image_message(TOP), image_message(WRIST)], state=STATE.tolist())
    first = peer.plan(goal).action_chunks[0]
    goal.noise_seed = 1
    goal.previous_chunk = [PreviousChunk(form="frozen", chunk=first, executed=1, delay=2)]
    second = values(peer.plan(goal).action_chunks[0])
    condition = ChunkCondition(values(first), executed=1, delay=2, form="frozen")
    np.testing.assert_array_equal(second, expected(runtime, noise_seed=1, previous_chunk=condition))
    np.testing.assert_array_equal(second[:2], values(first)[1:3])


def test_an_arm_gets_the_row_of_the_present_time(peer, domain, tmp_path):
    heard = []
    peer.node.create_subscription(Float64MultiArray, "/commands", heard.append, 10)
    arm = Child("arm", [str(ARM)], tmp_path / "arm.log", ros_environment(domain))

    def is_moved() -> bool:  # the first chunks may come before the arm has discovered the node
        stamp = later(peer.now(), -1.0)  # so that the first row is over
        joints(peer, stamp)
        wrist(peer, stamp)
        top(peer, stamp)
        commanded(peer)
        peer.listen(0.3)
        return bool(heard)

    try:
        peer.wait(is_moved, "command of the arm")
    finally:
        arm.stop()
    rows = values(peer.received["action_chunk"][-1])
    assert list(heard[0].data) in rows[1:].tolist()


def test_a_replay_refuses_a_policy_whose_state_it_cannot_play(engine, tmp_path):
    options = ReplayOptions(ARENA_BAG, tmp_path / "out", engine, "cpu", {})
    with pytest.raises(ValueError, match=r"a replay needs an engine that answers with text.*\(smolvla\)"):
        Replay(options)


def test_every_frame_continues_the_last_chunk_with_chunking(peer, runtime):
    stamp = peer.now()
    for name, value in (("chunking", "guided"), ("plan_on", "image")):
        assert peer.set_parameter(name, value).successful
    try:
        for seconds in (0.0, 0.1):
            joints(peer, later(stamp, seconds))
        wrist(peer, stamp)
        top(peer, stamp)
        first = commanded(peer)
        delay = int(peer.metrics()["chunk_delay"])
        top(peer, later(stamp, 0.1))  # 0.1 actions later
        second = values(peer.wait(lambda: peer.received["action_chunk"][1:], "second chunk")[0])
        assert peer.metrics()["chunks_continued"] == 1
    finally:
        for name, value in (("chunking", "off"), ("plan_on", "command")):
            assert peer.set_parameter(name, value).successful
    np.testing.assert_array_equal(first, expected(runtime))
    condition = ChunkCondition(shifted(first, 0.1), 0, delay, "guided", min(2 * delay, HORIZON))
    np.testing.assert_allclose(second, expected(runtime, previous_chunk=condition), atol=1e-5)
    assert np.abs(second - first).max() > 1e-3
