# SPDX-License-Identifier: Apache-2.0
"""Child processes end with the one that started them, whatever ends that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from edgellm_ros.ros.processes import (
    Child,
    held_back_signals,
    own_domain,
    ros_environment,
    split_ros_arguments,
)
from fixtures.process_state import runs

SLEEP = ["-c", "import time; print('awake', flush=True); time.sleep(60)"]


def wait_until(condition, timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_stop_ends_a_child_as_ctrl_c_would(tmp_path):
    child = Child("sleeper", SLEEP, tmp_path / "log", dict(os.environ))
    assert wait_until(lambda: "awake" in child.log_tail())
    assert child.stop() != 0
    assert "KeyboardInterrupt" in child.log_tail()


def test_stop_kills_a_child_that_does_not_listen(tmp_path):
    deaf = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + SLEEP[1]
    child = Child("deaf", ["-c", deaf], tmp_path / "log", dict(os.environ))
    assert wait_until(lambda: "awake" in child.log_tail())
    assert child.stop(timeout_s=0.3) == -signal.SIGKILL


def test_a_child_that_has_ended_keeps_its_exit_code_and_its_log(tmp_path):
    child = Child("failing", ["-c", "import sys; sys.exit('it broke')"], tmp_path / "log", dict(os.environ))
    assert wait_until(lambda: child.process.poll() is not None)
    assert child.stop() == 1
    assert child.log_tail() == "it broke"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel does this on Linux only")
def test_a_child_dies_with_a_parent_that_is_killed(tmp_path):
    program = (
        "import os, time\nfrom pathlib import Path\nfrom edgellm_ros.ros.processes import Child\n"
        f"child = Child('sleeper', {SLEEP!r}, Path({str(tmp_path / 'log')!r}), dict(os.environ))\n"
        "print(child.process.pid, flush=True)\ntime.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    assert runs(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert wait_until(lambda: not runs(pid))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("asked", [True, False])
def test_a_signal_that_is_held_back_interrupts_where_it_is_asked_for_and_at_the_end(number, asked):
    before, passed = signal.getsignal(number), []

    def work() -> None:
        with held_back_signals() as check:
            check()
            os.kill(os.getpid(), number)
            passed.append("the signal")
            if asked:
                check()
            passed.append("the question")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert passed == ["the signal", "the question"][: 1 if asked else 2]
    assert signal.getsignal(number) is before


def test_two_that_ask_at_once_get_two_domains():
    with own_domain() as first, own_domain() as second:
        assert first != second
        assert {first, second} <= set(range(1, 102))
        environment = ros_environment(first)
    assert environment["ROS_DOMAIN_ID"] == str(first)
    assert environment["ROS_AUTOMATIC_DISCOVERY_RANGE"] == "LOCALHOST"


def test_a_child_ends_on_stop_also_where_its_parent_ignores_ctrl_c(tmp_path):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does for what runs in the background
    try:
        child = Child("sleeper", SLEEP, tmp_path / "log", dict(os.environ))
    finally:
        signal.signal(signal.SIGINT, before)
    assert wait_until(lambda: "awake" in child.log_tail())
    child.stop()
    assert "KeyboardInterrupt" in child.log_tail()


@pytest.mark.parametrize(
    ("arguments", "own", "ros"),
    [
        ([], [], []),
        (["bag", "--remap", "/a:=~/b"], ["bag", "--remap", "/a:=~/b"], []),
        (["bag", "--ros-args", "-r", "/a:=/b"], ["bag"], ["--ros-args", "-r", "/a:=/b"]),
        (["--ros-args", "-p", "x:=1", "--", "bag"], ["bag"], ["--ros-args", "-p", "x:=1"]),
        (["a", "--ros-args", "b", "--", "c", "--ros-args"], ["a", "c"], ["--ros-args", "b", "--ros-args"]),
    ],
)
def test_ros_arguments_are_split_from_a_commands_own(arguments, own, ros):
    assert split_ros_arguments(arguments) == (own, ros)
