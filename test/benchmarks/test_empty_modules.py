# SPDX-License-Identifier: Apache-2.0
"""Programs with LeRobot's policies, started by benchmarks.empty_modules."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from lerobot.datasets.reader import Reader
from lerobot.policies.one.modeling import Policy
if __name__ == "__main__":
    print(Policy.name, Reader.__name__, sys.argv[1:])
"""
FILES = {
    "lerobot/__init__.py": "",
    "lerobot/policies/__init__.py": "raise ImportError('a policy that needs more')",
    "lerobot/policies/one/modeling.py": "class Policy:\n    name = 'one'\n",
    "program.py": PROGRAM,
}


@pytest.fixture
def folder(tmp_path) -> Path:
    """A LeRobot of one policy, and a program that imports it."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def launch(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run the launcher with `folder` on the path."""
    path = os.pathsep.join([str(folder), str(ROOT)])
    command = [sys.executable, "-m", "benchmarks.empty_modules", *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
    )


def test_a_program_gets_a_policy_of_lerobot_and_its_arguments(folder):
    done = launch(folder, "program", "--out", "there")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "one Reader ['--out', 'there']\n"


def test_without_a_module_the_usage_is_shown(folder):
    done = launch(folder)
    assert done.returncode == 1
    assert done.stderr == "usage: python -m benchmarks.empty_modules MODULE [ARGUMENTS]\n"
