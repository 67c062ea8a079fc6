# SPDX-License-Identifier: Apache-2.0
"""Child processes that end with their parent, and ROS domains of their own."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import edgellm_ros

NODE_MODULE = "edgellm_ros.ros.node.main"
FOLLOWER_MODULE = "edgellm_ros.ros.follower.main"
ARM_MODULE = "edgellm_ros.ros.arm.main"
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded before any fork: between fork and exec, loading may deadlock
# A DDS participant listens at 7400 + 250 * domain and a little above. Domains above 101 use ports that Linux
# assigns to outgoing connections.
_PORT_BASE, _PORT_GAIN, _LAST_DOMAIN = 7400, 250, 101


class Child:
    """A Python module run as a process of its own, its output in a log file.

    Ctrl-C of the terminal does not reach the child: its parent ends it. The kernel kills the child if the
    parent dies.
    """

    def __init__(
        self, name: str, arguments: Sequence[str], log: Path, env: dict[str, str], pipe: bool = False
    ) -> None:
        """Start `python <arguments>`.

        Standard error goes to `log`, standard output too unless `pipe`.
        """
        self.name, self.log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        parent = os.getpid()
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipe else file,
                stderr=file,
                env=env,
                start_new_session=True,
                preexec_fn=lambda: _begin_child(parent),
            )

    @property
    def stdout(self) -> IO[bytes]:
        """The pipe from the child's standard output."""
        if self.process.stdout is None:
            raise ValueError(f"{self.name} was started without a pipe")
        return self.process.stdout

    def log_tail(self, lines: int = 15) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self, timeout_s: float = 5.0) -> int:
        """End the child as Ctrl-C would, kill it after `timeout_s`; return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
        finally:
            if self.process.stdout is not None:
                self.process.stdout.close()


def ros_environment(domain: int) -> dict[str, str]:
    """Return this process's environment with a ROS domain limited to this computer."""
    source = str(Path(edgellm_ros.__file__).resolve().parents[1])
    paths = [source, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        **os.environ,
        "ROS_DOMAIN_ID": str(domain),
        "ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST",
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "PYTHONUNBUFFERED": "1",
    }


def require_ros(what: str) -> None:
    """Raise ImportError unless rclpy and our compiled interfaces can be imported."""
    for module in ("rclpy", "edgellm_ros.msg"):
        if importlib.util.find_spec(module) is None:
            raise ImportError(
                f"no Python module {module}: {what} needs ROS 2 and the compiled interfaces of edgellm_ros. "
                "In a ROS workspace, source install/setup.bash; in a clone, run `make demo`, which installs "
                "both"
            )


def ros_arguments(parameters: Mapping[str, str | int | float | bool]) -> list[str]:
    """Return a node's parameters as command-line arguments."""
    arguments = ["--ros-args"]
    for name, value in parameters.items():
        arguments += ["-p", f"{name}:={json.dumps(value)}"]  # JSON is YAML, which ROS reads values as
    return arguments


def split_ros_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into the program's arguments and rclpy's.

    rclpy's arguments are `--ros-args ... [--]`; only they may be passed to `rclpy.init`, because rcl reads
    `FROM:=TO` outside of `--ros-args` as a remapping rule and warns that this is deprecated.
    """
    own: list[str] = []
    ros: list[str] = []
    current = own
    for argument in arguments:
        if argument == "--ros-args":
            current = ros
        if current is ros and argument == "--":
            current = own
        else:
            current.append(argument)
    return own, ros


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM, as on Ctrl-C, while the context lasts."""

    def interrupt(signum, frame) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def held_back_signals() -> Iterator[Callable[[], None]]:
    """Hold SIGINT and SIGTERM back; yield a function that raises KeyboardInterrupt.

    KeyboardInterrupt is raised only if a signal was held back, and at the end of the context too. For code
    that must not be left half done, and for code that calls rclpy: an exception that a signal's handler
    raises inside its extension module becomes a SystemError, or ends the process at once.
    """
    came: list[int] = []

    def check() -> None:
        if came:
            raise KeyboardInterrupt

    before: dict[signal.Signals, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, lambda number, frame: came.append(number))
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    check()


@contextlib.contextmanager
def own_domain() -> Iterator[int]:
    """Reserve a ROS domain that is unused on this computer while the context lasts.

    Raises RuntimeError if all domains are in use.
    """
    for offset in range(_LAST_DOMAIN):
        domain = 1 + (os.getpid() + offset) % _LAST_DOMAIN
        # The lock excludes other calls of this function; a port in use shows that other nodes are there.
        path = Path(tempfile.gettempdir()) / f"edgellm_domain_{domain}.{os.getuid()}.lock"
        with path.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            if not _port_is_free(_PORT_BASE + _PORT_GAIN * domain + 10):
                continue
            yield domain
            return
    raise RuntimeError(f"all ROS domains from 1 to {_LAST_DOMAIN} are in use on this computer")


def _port_is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def end_with_parent(parent: int) -> None:
    """Let the kernel send SIGKILL to this process when its parent ends (Linux only)."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before the line above
            os._exit(1)


def _begin_child(parent: int) -> None:
    """Prepare the child process before it executes another program.

    SIGINT ends the child, even if the parent ignores SIGINT because a shell runs it in the background.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_parent(parent)
