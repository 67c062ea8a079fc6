# SPDX-License-Identifier: Apache-2.0
"""Steps of processors against LeRobot's own classes, each by itself."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.parity
pytest.importorskip("torch")

from processor_reference import record_normalisers, record_renames  # noqa: E402
from recorded_steps import CAMERA, compare_normalisers  # noqa: E402

from edgellm_ros.builder.checkpoint.checkpoint_config import read_section  # noqa: E402
from edgellm_ros.builder.policies.lerobot import STATE, camera_names  # noqa: E402
from edgellm_ros.builder.policies.processors import check_steps  # noqa: E402
from edgellm_ros.builder.policies.statistics import NEEDED  # noqa: E402


@pytest.mark.parametrize("epsilon", [1e-8, 1e-3])
@pytest.mark.parametrize("way", [*NEEDED, "IDENTITY"])
def test_normalised_values_are_those_of_lerobot(tmp_path, way, epsilon):
    record_normalisers(way, epsilon, tmp_path)
    compare_normalisers(tmp_path)


def test_renamed_observations_are_those_of_lerobot(tmp_path):
    renames = {"observation.images.front": CAMERA, "pose": STATE}
    expected = record_renames(renames, tmp_path)
    config = read_section(tmp_path / "config.json")
    renamed = check_steps(tmp_path, config)
    given = {name: number for number, name in enumerate([*renames, "other"])}
    assert {name: given[renamed.get(name, name)] for name in expected} == expected
    assert camera_names(config, renamed) == ("front",)
