# SPDX-License-Identifier: Apache-2.0
"""Replays for a policy: joint states and cameras in, chunks of actions out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgellm_ros.replay.bag import Bag, BagMessage
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures.made_bags import copy_bag, joint_state, raw_image, string, write_bag

pytest.importorskip("rclpy")
pytest.importorskip("edgellm_ros.msg")
from fixtures import policy_robot

pytestmark = [pytest.mark.real_time, pytest.mark.timeout(600)]

SECOND = 10**9


@pytest.fixture(scope="module")
def arm(tmp_path_factory) -> tuple[object, ...]:
    """Options for the engine of a policy, and for the joints of its state."""
    folder = tmp_path_factory.mktemp("policy")
    engine, params = policy_robot.export_policy(folder), folder / "params.yaml"
    joints = ", ".join(policy_robot.STATE_JOINTS)
    params.write_text(f"edgellm: {{ros__parameters: {{state_joints: [{joints}]}}}}")
    return "--engine", engine, "--params", params


@pytest.fixture(scope="module")
def arm_bag(tmp_path_factory) -> Path:
    """A bag with joint states and frames of two times, and a command after the second."""
    messages = []
    for stamp, shift in ((100 * SECOND, 1), (101 * SECOND, 0)):
        positions = {joint: value + shift for joint, value in policy_robot.JOINTS.items()}
        joints = joint_state(stamp, positions)
        messages.append(("/edgellm/joint_states", "sensor_msgs/msg/JointState", stamp, joints))
        for name, pixels in (("wrist/image", policy_robot.WRIST), ("image", policy_robot.TOP)):
            frame = raw_image(stamp, pixels + np.uint8(shift))
            messages.append((f"/edgellm/{name}", "sensor_msgs/msg/Image", stamp, frame))
    command = string(policy_robot.TASK)
    messages.append(("/edgellm/command", "std_msgs/msg/String", stamp + SECOND // 10, command))
    return write_bag(tmp_path_factory.mktemp("arm") / "bag", messages)


def test_the_chunk_is_the_runtime_s_and_a_second_replay_is_equal(replay, arm, arm_bag, tmp_path):
    first = replay(arm_bag, *arm)
    assert first.code == 0, first.err
    assert first.json["inputs"] == {"image": 2, "command": 1, "wrist/image": 2, "joint_states": 2}
    assert first.json["outputs"]["action_chunk"] == 1
    with Bag(tmp_path / "out") as out, LLMInferenceRuntime(arm[1]) as runtime:
        (chunk,) = (message.decode() for message in out.messages(["/edgellm/action_chunk"]))
        np.testing.assert_array_equal(policy_robot.values(chunk), policy_robot.answer(runtime))
    second = replay(arm_bag, *arm, "--expect", tmp_path / "out", out="again")
    assert (second.code, second.json["comparison"]["first"]) == (0, None), second.err


def test_a_robot_may_have_some_of_the_cameras(replay, arm, arm_bag, tmp_path):
    one = copy_bag(tmp_path / "one", rename={"/edgellm/wrist/image": "/other"}, source=arm_bag)
    lacking = replay(one, *arm)
    assert lacking.code == 2
    assert "no messages for ~/wrist/image (/edgellm/wrist/image)" in lacking.err
    run = replay(one, *arm, "--cameras", "top")
    assert run.code == 0, run.err
    assert run.json["outputs"]["action_chunk"] == 1


def test_a_frame_that_is_missing_is_named(replay, arm, arm_bag, tmp_path):
    assert replay(arm_bag, *arm).code == 0

    def is_kept(message: BagMessage) -> bool:
        return message.topic.name != "/edgellm/wrist/image" or message.time > 100 * SECOND

    less = copy_bag(tmp_path / "less", keep=is_kept, source=arm_bag)
    run = replay(less, *arm, "--expect", tmp_path / "out", out="again")
    assert run.code == 1
    assert (run.first["topic"], run.first["field"]) == ("~/wrist/image", "message")


def test_a_camera_that_the_policy_does_not_have_is_refused(replay, arm, arm_bag):
    run = replay(arm_bag, *arm, "--cameras", "top,left")
    assert run.code == 2
    assert "cameras must be different cameras of top, wrist, got 'top, left'" in run.err


def test_the_cameras_of_the_parameters_file_are_played(replay, arm, arm_bag, tmp_path):
    _, engine, _, params = arm
    one = tmp_path / "params.yaml"
    one.write_text(params.read_text().replace("{state_joints", "{cameras: [top], state_joints"))
    run = replay(arm_bag, "--engine", engine, "--params", one)
    assert run.code == 0, run.err
    assert run.json["inputs"] == {"image": 2, "command": 1, "joint_states": 2}
    with Bag(tmp_path / "out") as out, LLMInferenceRuntime(engine) as runtime:
        (chunk,) = (message.decode() for message in out.messages(["/edgellm/action_chunk"]))
        alone = policy_robot.answer(runtime, images=(policy_robot.TOP,), cameras=("top",))
        np.testing.assert_array_equal(policy_robot.values(chunk), alone)


def test_a_robot_without_the_joints_is_reported(replay, arm, arm_bag):
    run = replay(arm_bag, *arm[:2])
    assert run.code == 0, run.err
    assert run.json["became"] == {"joint_states_incomplete": 2, "plans_stale_input": 1}


def test_a_node_that_runs_has_all_cameras_if_it_names_none(run_beside, arm, arm_bag):
    joints = {"state_joints": policy_robot.STATE_JOINTS}
    run = run_beside(bag=arm_bag, engine=arm[1], cameras=[""], **joints)
    assert run.code == 0, run.err
    assert run.json["outputs"]["action_chunk"] == 1


def test_a_node_that_runs_with_other_cameras_is_refused(run_beside, arm, arm_bag):
    run = run_beside(bag=arm_bag, engine=arm[1], cameras=["top"])
    assert run.code == 3
    assert "parameter cameras is ['top'], expected ['top', 'wrist'] for this replay" in run.err
