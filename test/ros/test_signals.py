# SPDX-License-Identifier: Apache-2.0
"""The end of a process by signals, also while its main thread is busy elsewhere."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from edgellm_arena.ros.demo import ARENA_MODULE
from edgellm_ros.ros import signals
from edgellm_ros.ros.processes import ARM_MODULE, FOLLOWER_MODULE, NODE_MODULE

# Its main thread runs no Python, as while a library loads engines, and it never ends by itself.
BUSY = """
import ctypes, sys
from edgellm_ros.ros import signals
signals.SAME_REQUEST_S = float(sys.argv[1])
signals.call_on_signal(lambda: print("asked", flush=True))
print("ready", flush=True)
while True:
    ctypes.CDLL(None).sleep(60)
"""


@pytest.fixture
def same_request_s() -> float:
    return signals.SAME_REQUEST_S


@pytest.fixture
def busy(same_request_s) -> Iterator[subprocess.Popen]:
    """A process that has its signals watched and does not end."""
    command = [sys.executable, "-c", BUSY, str(same_request_s)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate()


def test_the_first_signal_asks_even_a_busy_process_to_end(busy):
    busy.send_signal(signal.SIGINT)
    assert busy.stdout.readline() == "asked\n"
    assert busy.poll() is None


def test_signals_that_follow_at_once_change_nothing(busy):
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
        busy.send_signal(number)
        time.sleep(0.1)
    assert busy.stdout.readline() == "asked\n"
    time.sleep(0.3)
    assert busy.poll() is None


@pytest.mark.parametrize("same_request_s", [0.2])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_late_second_signal_ends_the_process_at_once(busy, same_request_s, number):
    busy.send_signal(signal.SIGINT)
    assert busy.stdout.readline() == "asked\n"
    time.sleep(same_request_s + 0.3)
    busy.send_signal(number)
    assert busy.wait(5) == 128 + number
    assert busy.stderr.read() == f"ended by a second {number.name}\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("imported", ["rclpy", "numpy.linalg", "edgellm_ros.ros.messaging"])
@pytest.mark.parametrize(
    "module",
    [NODE_MODULE, FOLLOWER_MODULE, ARM_MODULE, ARENA_MODULE],
    ids=["node", "follower", "arm", "arena"],
)
def test_a_signal_during_the_imports_ends_the_process_in_silence(module, imported, number):
    code = (
        "import os, runpy, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == {imported!r}: os.kill(os.getpid(), {number.value})\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        f"runpy.run_module({module!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_signal_while_python_ends_does_not_change_the_exit_code_of_the_node(domain):
    """C's exit handlers run after Python has restored the default action of signals.

    on_exit passes the exit code, 2 for a wrong parameter, which is also the number of SIGINT.
    """
    from edgellm_ros.ros.processes import ros_environment

    code = (
        "import ctypes, sys\n"
        "from edgellm_ros.ros.node.main import main\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.on_exit(getattr(libc, 'raise'), None)\n"
        "sys.exit(main(['--ros-args', '-p', 'plan_on:=whistle']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=ros_environment(domain), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2, done.stderr
