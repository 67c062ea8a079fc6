# SPDX-License-Identifier: Apache-2.0
"""Examples without node, camera, follower or file, or at Ctrl-C: no traceback."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edgellm_ros.ros.processes import ros_environment

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def start(domain):
    """`start("name.py", argument, ...)` starts an example, in a domain without nodes."""
    started = []

    def start_example(name, *arguments):
        pipe = subprocess.PIPE
        command = [sys.executable, EXAMPLES / name, *arguments]
        environment = ros_environment(domain)
        # A shell lets what it starts in the background ignore Ctrl-C, and a process inherits that.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            started.append(
                subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)
            )
        finally:
            signal.signal(signal.SIGINT, before)
        return started[-1]

    yield start_example
    for process in started:
        process.kill()
        process.communicate()


def assert_ends_in_one_line(process, *words: str, codes: tuple[int, ...] = (1,), timeout_s: float = 60.0):
    out, err = process.communicate(timeout=timeout_s)
    assert process.returncode in codes, err
    assert len(err.splitlines()) == 1, err
    for word in words:
        assert word in err
    return out


def test_action_client_without_a_node_ends_with_one_line(start):
    assert_ends_in_one_line(start("action_client.py"), "action_client.py: /edgellm/plan: no server")


def test_action_client_without_its_file_ends_with_one_line(start):
    assert_ends_in_one_line(start("action_client.py", "no.png"), "action_client.py: no.png: no such file")


def test_camera_conversation_without_a_camera_ends_with_one_line(start):
    process = start("camera_conversation.py")
    process.stdin.write("what do you see?\n")
    process.stdin.close()
    process.stdin = None
    assert_ends_in_one_line(process, "no frame on /image")


def test_follower_on_a_robot_without_a_node_ends_with_one_line(start):
    assert_ends_in_one_line(start("follower_on_a_robot.py"), "is edgellm running?")


def test_follower_on_a_robot_without_a_follower_ends_with_one_line(peer, start):
    from std_msgs.msg import String

    peer.node.create_subscription(String, "/edgellm/command", lambda message: None, 10)
    process = start("follower_on_a_robot.py")
    process.stdin.write("go\n")
    process.stdin.close()
    process.stdin = None
    peer.wait(lambda: process.poll() is not None, "end of the example", timeout_s=60.0)
    assert_ends_in_one_line(process, "no answer on /edgellm_follower/resume: is edgellm_follower running?")


@pytest.mark.parametrize("name", ["action_client.py", "camera_conversation.py", "follower_on_a_robot.py"])
def test_ctrl_c_ends_an_example_without_a_traceback(start, peer, name):
    known = set(peer.node.get_node_names())
    process = start(name)
    peer.wait(lambda: set(peer.node.get_node_names()) - known, "node of the example", timeout_s=30.0)
    time.sleep(0.5)  # the code after the node's creation
    process.send_signal(signal.SIGINT)
    process.wait(timeout=30)  # before `communicate` closes its input, at whose end a conversation ends too
    _, err = process.communicate()
    assert process.returncode == 1, err
    assert [line.partition(":")[0] for line in err.splitlines()] == [name]
