# SPDX-License-Identifier: Apache-2.0
"""Policies and steps of processors that newer versions of LeRobot have saved.

Actions and values are compared with those of the same version.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from lerobot_policies import NEWER, run
from policy_shapes import ACT_SHAPES, SMOLVLA_SHAPES
from recorded_policies import compare
from recorded_steps import compare_normalisers, compare_relative_actions

from edgellm_ros.builder.policies.statistics import NEEDED

pytestmark = pytest.mark.parity


@pytest.fixture(scope="module", params=NEWER)
def recorded(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(f"lerobot-{request.param}")
    run(request.param, "record_lerobot.py", request.param, str(folder))
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
