# SPDX-License-Identifier: Apache-2.0
"""Runs the commands of `training` as a user does, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def run_python(*arguments: str) -> str:
    """What `python arguments...` prints, which must succeed."""
    # One thread each: threads that wait for each other starve the workers.
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
