# SPDX-License-Identifier: Apache-2.0
"""Child processes that cannot outlive the one that started them, and a ROS domain of their own to talk in."""

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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import edgellm_ros

NODE_MODULE = "edgellm_ros.ros.node.main"
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded here: nothing may be loaded between fork and exec
# A DDS participant listens at 7400 + 250 * domain and a little above. Above 101 these ports meet those that
# Linux gives to outgoing connections.
_PORT_BASE, _PORT_GAIN, _LAST_DOMAIN = 7400, 250, 101


class Child:
    """A Python module run as a process of its own, its output in a log file.

    It gets no Ctrl-C of the terminal (its parent decides when it ends) and is killed by the kernel if the
    parent dies.
    """

    def __init__(
        self, name: str, arguments: Sequence[str], log: Path, env: dict[str, str], pipe: bool = False
    ) -> None:
        """Start `python <arguments>`; standard error goes to `log`, standard output too unless `pipe`."""
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
        """The last lines that it wrote."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self, timeout_s: float = 5.0) -> int:
        """Ask it to end as Ctrl-C would; kill it if it does not. Returns its exit code."""
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
    """The environment of this process, with a ROS domain that is not seen outside this computer."""
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
    """ImportError with a way out unless rclpy and our compiled interfaces can be imported."""
    for module in ("rclpy", "edgellm_ros.msg"):
        if importlib.util.find_spec(module) is None:
            raise ImportError(
                f"no Python module {module}: {what} needs ROS 2 and this package built for it; "
                "`make demo` in a clone brings both"
            )


def ros_arguments(parameters: Mapping[str, str | int | float | bool]) -> list[str]:
    """A node's parameters as command-line arguments."""
    arguments = ["--ros-args"]
    for name, value in parameters.items():
        arguments += ["-p", f"{name}:={json.dumps(value)}"]  # JSON is YAML, which ROS reads values as
    return arguments


def split_ros_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into the command's own arguments and those for rclpy (`--ros-args ... [--]`).

    rcl also takes `FROM:=TO` outside of `--ros-args` for a remapping rule, with a warning that this is
    deprecated. The second list is safe to give to `rclpy.init`.
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
    """SIGTERM takes the same way out as Ctrl-C."""

    def interrupt(signum, frame) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def own_domain() -> Iterator[int]:
    """A ROS domain that nobody uses on this computer, kept for as long as the context lasts.

    RuntimeError if all are taken.
    """
    for offset in range(_LAST_DOMAIN):
        domain = 1 + (os.getpid() + offset) % _LAST_DOMAIN
        # The lock keeps out others who ask here; the port tells whether anybody else is there.
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


def _begin_child(parent: int) -> None:
    """In the child, before it becomes another program: SIGINT ends me, although a shell that runs us in the
    background has us ignore it; and SIGKILL me when my parent ends (Linux; elsewhere nothing).
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the line above
            os._exit(1)
