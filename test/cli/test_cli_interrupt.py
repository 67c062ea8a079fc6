# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C before and after the command itself: exit codes stay what they are."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

RUN = "import runpy; runpy.run_module('edgellm_ros', run_name='__main__')"


def run(before: str, *arguments: str) -> subprocess.CompletedProcess:
    """Run the command in a process that executes other code first."""
    return subprocess.run(
        [sys.executable, "-c", f"{before}\n{RUN}", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # as in a terminal
    )


def test_ctrl_c_during_the_first_imports_ends_with_130():
    done = run(
        "import os, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'edgellm_ros.cli': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())",
        "--help",
    )
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.slow
def test_ctrl_c_while_python_ends_does_not_change_the_exit_code():
    # C's exit handlers run after Python has restored the default action of signals. on_exit passes the exit
    # code, 2, which is also the number of SIGINT.
    done = run(
        "import ctypes; libc = ctypes.CDLL(None); libc.on_exit(getattr(libc, 'raise'), None)",
        "inspect",
        "/nowhere",
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("edgellm inspect: error: ")
