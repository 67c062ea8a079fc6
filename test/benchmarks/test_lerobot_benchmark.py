# SPDX-License-Identifier: Apache-2.0
"""The benchmark beside LeRobot runs, and both compute the same actions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.parity
ROOT, INSTALLED = Path(__file__).parents[2], Path(sys.prefix) / "lerobot"


@pytest.mark.parametrize("policy", ["act", "diffusion"])
def test_both_compute_the_same_actions(policy):
    if not INSTALLED.is_dir():
        pytest.skip(f"{INSTALLED} has no LeRobot: make parity installs it")
    options = ["--policy", policy, "--small", "--cameras", "1", "--runs", "1", "--no-compile"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.lerobot", *options],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(INSTALLED)])},
        cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["difference"] < 1e-4
    assert found["edgellm"]["median"] > 0
    assert found["eager"]["median"] > 0
    assert "compiled" not in found
