# SPDX-License-Identifier: Apache-2.0
"""`edgellm demo --arm`: the scripted controller over topics, and what is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest

from edgellm_ros.cli import main
from edgellm_tabletop.episodes.closed_loop import goal_of, play
from edgellm_tabletop.episodes.drivers import CONTRACT, ArmInProcess, ExpertDriver
from edgellm_tabletop.episodes.robot import START_NS, TICK_NS, Robot
from edgellm_tabletop.episodes.summary import describe
from edgellm_tabletop.world import Tabletop
from fixtures.rendering import picture_of

SEED = 900_001


@pytest.mark.real_time
@pytest.mark.timeout(600)
def test_the_experts_chunks_place_the_block_over_topics_exactly_as_in_process(tmp_path):
    pytest.importorskip("rclpy")
    pytest.importorskip("edgellm_ros.msg")
    world = Tabletop()
    picture_of(world)
    robot = Robot(world, START_NS + TICK_NS)
    robot.reset(SEED, goal_of(SEED))
    expected = describe(robot, SEED, play(robot, ExpertDriver(robot, ArmInProcess(robot))))
    world.close()
    arguments = ["demo", "--arm", "--expert", "--seed", str(SEED), "--out", tmp_path, "--json"]
    command = [sys.executable, "-m", "edgellm_ros", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    (drive,) = summary["drives"]
    assert summary["successes"]["count"] == 1
    assert (summary["violations"], summary["refused"]) == (0, {})
    assert drive["largest_speed"] <= 1 + 1e-6
    for name, value in expected.items():
        if not name.endswith("_seconds"):  # by the computer's clock
            assert drive[name] == value, name
    assert "placed          1 of 1" in done.stderr
    assert min(cv2.imread(drive["picture"]).shape[:2]) > 800


def error_of(capsys, *arguments: str) -> str:
    """Run a command that fails; return its only line on standard error."""
    assert main(list(arguments)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


COMMANDS = [["demo", "--arm"], ["evaluate", "arm"]]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_without_weights_one_line_says_how_to_make_them(capsys, monkeypatch, tmp_path, command):
    monkeypatch.chdir(tmp_path)
    line = error_of(capsys, *command)
    assert "no policy in models/so101: make it with `python -m training.arm --out models/so101`" in line
    assert "no policy in elsewhere" in error_of(capsys, *command, "--checkpoint", "elsewhere")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_without_mujoco_one_line_names_the_command_of_pip(capsys, monkeypatch, command):
    for name in [name for name in sys.modules if name.startswith("edgellm_tabletop")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mujoco", None)
    line = error_of(capsys, *command, "--expert")
    assert "needs the distribution edgellm-tabletop with MuJoCo" in line
    assert "pip install edgellm-tabletop" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arm", "--spoken"], "--spoken True is for the arena: not with --arm"),
        (["--arm", "--expert", "--lora", "german"], "--lora german is for the arena: not with --arm"),
        (["--expert"], "--expert is for the arm: expected --arm too"),
        (["--arm", "--expert", "--checkpoint", "x"], "--checkpoint x and --expert: expected one of them"),
    ],
)
def test_options_that_do_not_go_together_are_refused(capsys, arguments, message):
    assert message in error_of(capsys, "demo", *arguments)


class TestMessages:
    @pytest.fixture
    def link(self):
        pytest.importorskip("rclpy")
        pytest.importorskip("edgellm_ros.msg")
        from edgellm_tabletop.ros import tabletop_link

        return tabletop_link

    def test_what_edgellm_arm_sends_is_read_in_the_contracts_order(self, link):
        from edgellm_ros.ros.arm.messages import to_trajectory
        from edgellm_ros.ros.arm.motion import Motion, Profile
        from edgellm_tabletop.episodes.drivers import contract

        positions, speeds = np.arange(12.0).reshape(2, 6), np.zeros((2, 6))
        motion = Motion(0.0, 0.02, positions, speeds, Profile(positions, speeds))
        message = to_trajectory(motion, contract().ros_names, 7 * 10**9)
        message.joint_names = list(message.joint_names)[::-1]
        times, found, _ = link.to_points(message, 0)
        assert times == [7 * 10**9, 7 * 10**9 + 20 * 10**6]
        np.testing.assert_array_equal(found, positions[:, ::-1])
        message.header.stamp.sec = 0
        assert link.to_points(message, 5)[0][0] == 5

    def test_a_trajectory_of_other_joints_is_refused(self, link):
        from trajectory_msgs.msg import JointTrajectory

        with pytest.raises(link.LinkError, match="a trajectory of 'wheel': this arm has"):
            link.to_points(JointTrajectory(joint_names=["wheel"]), 0)


def test_the_nodes_get_the_contract_the_topics_and_the_delay():
    pytest.importorskip("rclpy")
    from edgellm_tabletop.ros import demo

    options = demo.DemoOptions(1, 5, Path("out"), Path("engine"), Path("policy"), inference_delay=0.8)
    arm, node, world = (
        " ".join(make(options)) for make in (demo.arm_arguments, demo.node_arguments, demo.world_arguments)
    )
    for words in (f'contract:="{CONTRACT}"', "dry_run:=false", "max_chunk_age:=2.8", "engine_dir:="):
        assert words in arm
    for words in ("~/image:=/front/image_raw", "~/joint_states:=edgellm_arm/state", "max_input_age:=1.8"):
        assert words in node
    assert "inference_delay:=0.8" in world
    assert "expert:=false" in world
