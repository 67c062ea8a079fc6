# SPDX-License-Identifier: Apache-2.0
"""Policies and steps of processors that newer versions of LeRobot have saved.

Actions and values are compared with those of the same version.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from lerobot_policies import NEWER, installed
from policy_shapes import ACT_SHAPES, SMOLVLA_SHAPES
from recorded_policies import compare
from recorded_steps import compare_normalisers, compare_relative_actions

from edgellm_ros.builder.policies.statistics import NEEDED

pytestmark = pytest.mark.parity
RECORDER = Path(__file__).with_name("record_lerobot.py")


@pytest.fixture(scope="module", params=NEWER)
def recorded(request, tmp_path_factory) -> Path:
    if sys.version_info < (3, 11):
        pytest.skip("LeRobot since 0.5 needs Python 3.11 or newer")
    if not installed(request.param).is_dir():
        pytest.skip(f"{installed(request.param)} has no LeRobot: make parity installs it")
    folder = tmp_path_factory.mktemp(f"lerobot-{request.param}")
    command = [sys.executable, str(RECORDER), request.param, str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-3000:]
    return folder


@pytest.mark.parametrize(
    "policy", [*(f"act/{name}" for name in ACT_SHAPES), *(f"smolvla/{name}" for name in SMOLVLA_SHAPES)]
)
def test_actions_are_those_of_lerobot(recorded, policy, tmp_path):
    compare(recorded / policy, tmp_path / "engine")
    for folder in (recorded / policy, tmp_path / "engine"):
        shutil.rmtree(folder)  # a backbone has 45 to 100 MB


@pytest.mark.parametrize("way", [*NEEDED, "IDENTITY"])
def test_normalised_values_are_those_of_lerobot(recorded, way):
    compare_normalisers(recorded / "normalisers" / way)


def test_relative_actions_are_those_of_lerobot(recorded):
    compare_relative_actions(recorded / "relative")
