# SPDX-License-Identifier: Apache-2.0
"""`colcon build` in a workspace that holds a clone, as people do who have ROS installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("rclpy")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
PREFIX = Path(sys.prefix)


@pytest.fixture(scope="module")
def install(tmp_path_factory) -> Path:
    """The install folder of a workspace that was built."""
    workspace = tmp_path_factory.mktemp("workspace")
    (workspace / "src").mkdir()
    (workspace / "src" / "edgellm_ros").symlink_to(ROOT)
    home = workspace / "colcon"
    home.mkdir()
    arguments = [
        f"-DCMAKE_PROJECT_INCLUDE={ROOT / 'tools' / 'wheels_fix.cmake'}",
        f"-DPython3_EXECUTABLE={PREFIX / 'bin' / 'python3'}",
        "-DBUILD_TESTING=OFF",
    ]
    (home / "defaults.yaml").write_text(f"build:\n  cmake-args: {arguments}\n")
    environment = {
        **os.environ,
        "PATH": f"{PREFIX / 'bin'}:{os.environ['PATH']}",
        "AMENT_PREFIX_PATH": str(PREFIX),
        "CMAKE_PREFIX_PATH": str(PREFIX),
        "COLCON_HOME": str(home),
    }
    done = subprocess.run(
        ["colcon", "build"], cwd=workspace, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return workspace / "install"


def in_workspace(install: Path, command: str) -> subprocess.CompletedProcess:
    """Run a shell command after `. install/setup.bash`."""
    script = f". {install / 'setup.bash'} && {command}"
    environment = {
        **os.environ,
        "PATH": f"{PREFIX / 'bin'}:{os.environ['PATH']}",
        "AMENT_PREFIX_PATH": str(PREFIX),
    }
    return subprocess.run(
        ["bash", "-c", script], cwd=install, env=environment, capture_output=True, text=True, timeout=60
    )


def test_interfaces_and_code_are_one_python_package(install):
    code = (
        "import edgellm_ros, edgellm_ros.msg, edgellm_ros.runtime.request as request;"
        "print(edgellm_ros.__file__, edgellm_ros.msg.__file__, request.__file__)"
    )
    done = in_workspace(install, f'python3 -c "{code}"')
    assert done.returncode == 0, done.stderr
    assert all(path.startswith(str(install)) for path in done.stdout.split()), done.stdout


def test_the_node_is_an_executable_of_the_package(install):
    done = in_workspace(install, "edgellm_ros/lib/edgellm_ros/edgellm_node --ros-args -p plan_on:=whistle")
    assert done.returncode == 2
    assert done.stderr.strip() == "edgellm_node: error: plan_on must be one of command, image, got 'whistle'"


def test_the_replay_is_an_executable_of_the_package(install):
    done = in_workspace(install, "edgellm_ros/lib/edgellm_ros/replay_node /nowhere --out /nowhere/out")
    assert done.returncode == 2
    assert done.stderr.startswith("edgellm replay: error: ")


def test_launch_and_parameter_files_are_installed(install):
    share = install / "edgellm_ros" / "share" / "edgellm_ros"
    for folder in ("launch", "config"):
        assert sorted(os.listdir(share / folder)) == sorted(
            name for name in os.listdir(ROOT / folder) if not name.startswith("__")
        )
