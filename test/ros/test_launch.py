# SPDX-License-Identifier: Apache-2.0
"""Launch files and parameter files, as far as they can be checked without an installed ROS."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import yaml

from edgellm_ros.ros.node.parameters import SPECS

ROOT = Path(__file__).parents[2]
LAUNCH_FILES = sorted((ROOT / "launch").glob("*.launch.py"))
CONFIG_FILES = sorted((ROOT / "config").glob("*.yaml"))


def flat(values: dict, prefix: str = "") -> dict:
    names = {}
    for name, value in values.items():
        names |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return names


@pytest.mark.parametrize("path", LAUNCH_FILES, ids=lambda path: path.name)
def test_launch_files_compile(path):
    compile(path.read_text(), str(path), "exec")


@pytest.mark.skipif(importlib.util.find_spec("launch_ros") is None, reason="ROS's launch is not installed")
@pytest.mark.parametrize("path", LAUNCH_FILES, ids=lambda path: path.name)
def test_every_launch_argument_is_described(path):
    from launch.launch_description_sources import get_launch_description_from_python_launch_file

    description = get_launch_description_from_python_launch_file(str(path))
    arguments = description.get_launch_arguments()
    assert arguments
    assert all(argument.description for argument in arguments)


@pytest.mark.parametrize("path", CONFIG_FILES, ids=lambda path: path.name)
def test_parameter_files_name_parameters_of_the_node_with_values_of_their_type(path):
    for node in yaml.safe_load(path.read_text()).values():
        for name, value in flat(node["ros__parameters"]).items():
            if name == "use_sim_time":
                continue
            assert type(value) is type(SPECS[name].default), name
