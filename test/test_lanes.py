# SPDX-License-Identifier: Apache-2.0
"""The fast lane, `make test-fast`: some tests of every part."""

from __future__ import annotations

import importlib
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {path.parent.name for path in (ROOT / "test").glob("*/test_*.py")}


def pytest_options(target: str) -> list[str]:
    """The options that `make target` gives to pytest, which it calls once."""
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True)
    (line,) = (line for line in done.stdout.splitlines() if " -m pytest " in line)
    return shlex.split(line.partition(" -m pytest ")[2])


def folders(paths: Iterable[Path]) -> set[str]:
    return {path.parent.name for path in paths if path.parent != ROOT / "test"}


@pytest.mark.slow
def test_the_fast_lane_has_tests_of_every_folder(request):
    """A run of all tests knows those of the fast lane; else pytest collects them."""
    items = request.session.items
    if folders(item.path for item in items) == FOLDERS:
        options = pytest_options("test-fast")
        assert options[options.index("-m") + 1] == "not slow and not parity and not tensorrt_build"
        assert folders(item.path for item in items if item.get_closest_marker("slow") is None) == FOLDERS
        return
    command = [sys.executable, "-m", "pytest", *pytest_options("test-fast"), "--collect-only", "-q"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    tests = [line.split("::")[0] for line in done.stdout.splitlines() if line.startswith("test/")]
    assert folders(ROOT / test for test in tests) == FOLDERS


@pytest.mark.parametrize("name", ["torch", "transformers", "ray", "peft", "sentencepiece"])
def test_packages_of_make_parity_are_not_there_for_other_tests(name):
    """Also where they are installed: the package and its tests must do without them."""
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(name)
