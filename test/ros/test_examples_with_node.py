# SPDX-License-Identifier: Apache-2.0
"""The examples that talk to a node, each as a user starts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import cv2
import pytest

from edgellm_ros.ros.processes import FOLLOWER_MODULE, Child, ros_environment

STOPPED = "the robot stops until ~/resume"
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def start(domain):
    """`start("name.py", argument, ...)` starts an example."""
    started = []

    def start_example(name, *arguments):
        command = [sys.executable, EXAMPLES / name, *arguments]
        pipe = subprocess.PIPE
        environment = ros_environment(domain)
        started.append(
            subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)
        )
        return started[-1]

    yield start_example
    for process in started:
        process.kill()
        process.communicate()


def test_action_client_prints_words_and_a_path(node, start, scene, tmp_path):
    cv2.imwrite(str(tmp_path / "frame.png"), scene.pixels[..., ::-1])
    process = start("action_client.py", tmp_path / "frame.png")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    words, *path, seen = out.splitlines()
    assert words
    assert seen
    assert len(path) == 41


def test_camera_conversation_answers_each_line_with_what_was_said(node, peer, start, scene):
    process = start("camera_conversation.py", "--ros-args", "-r", "image:=/edgellm/image")
    process.stdin.write("what do you see?\nwhere is it?\n")
    process.stdin.close()
    process.stdin = None
    prompts = []

    def ended():
        peer.frame(scene.pixels)
        prompts[:] = [generation.prompt_token_count for generation in peer.received["generation"]]
        return process.poll() is not None

    peer.clear()
    peer.wait(ended, "end of the conversation", timeout_s=60.0)
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert len(out.splitlines()) == 2
    assert all(out.splitlines())
    first, second = prompts[-2:]
    assert second > first + 80  # the frame and the words of the first turn


def test_follower_on_a_robot_sends_commands_and_stops_the_robot(peer, start, domain, tmp_path):
    from diagnostic_msgs.msg import DiagnosticArray
    from std_msgs.msg import String

    heard, messages = [], []
    peer.node.create_subscription(String, "/edgellm/command", lambda message: heard.append(message.data), 10)
    peer.node.create_subscription(
        DiagnosticArray, "/diagnostics", lambda array: messages.extend(s.message for s in array.status), 10
    )
    arguments = ["-m", FOLLOWER_MODULE, "--ros-args", "-p", "autostart:=true"]
    follower = Child("follower", arguments, tmp_path / "log", ros_environment(domain))
    try:
        process = start("follower_on_a_robot.py")

        def say(line: str) -> None:
            process.stdin.write(f"{line}\n")
            process.stdin.flush()

        def is_heard() -> bool:  # the first messages may come before the peer has discovered the example
            say("go to the red box")
            peer.listen(0.3)
            return bool(heard)

        peer.wait(is_heard, "command")
        assert set(heard) == {"go to the red box"}
        say("")
        robot = peer.node.create_publisher(String, "/edgellm/text", 10)
        peer.wait(lambda: robot.get_subscription_count() > 0, "subscription of the example")
        for text in ("i drive to a test", "i drive to a test", "i stop for a test"):
            robot.publish(String(data=text))
        peer.wait(lambda: heard[-1] == "", "command that ends the other")
        peer.wait(lambda: "stopped until ~/resume" in messages, "status of the follower")
        out, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, "")
        lines = out.splitlines()
        of_the_test = [line for line in lines if line.endswith(" a test")]
        assert of_the_test == ["robot: i drive to a test", "robot: i stop for a test"]
        assert [line for line in lines if not line.startswith("robot: ")] == [STOPPED, STOPPED]
    finally:
        follower.stop()
