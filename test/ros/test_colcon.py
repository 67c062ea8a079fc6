# SPDX-License-Identifier: Apache-2.0
"""`colcon build` and `colcon test` in a workspace that holds a clone.

The workspace is like one on a robot with ROS installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("rclpy")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
PREFIX = Path(sys.prefix)


@dataclass(frozen=True)
class Workspace:
    """A colcon workspace with a link to the clone."""

    root: Path
    environment: dict[str, str]

    @property
    def install(self) -> Path:
        """Where the package is installed."""
        return self.root / "install"

    def colcon(self, *arguments: str) -> subprocess.CompletedProcess:
        """Run colcon in the workspace."""
        return subprocess.run(
            ["colcon", *arguments],
            cwd=self.root,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=600,
        )


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Workspace:
    """A workspace that was built."""
    root = tmp_path_factory.mktemp("workspace")
    (root / "src").mkdir()
    (root / "src" / "edgellm_ros").symlink_to(ROOT)
    home = root / "colcon"
    home.mkdir()
    arguments = [
        f"-DCMAKE_PROJECT_INCLUDE={ROOT / 'tools' / 'wheels_fix.cmake'}",
        f"-DPython3_EXECUTABLE={PREFIX / 'bin' / 'python3'}",
    ]
    (home / "defaults.yaml").write_text(f"build:\n  cmake-args: {arguments}\n")
    environment = {
        **os.environ,
        "PATH": f"{PREFIX / 'bin'}:{os.environ['PATH']}",
        "AMENT_PREFIX_PATH": str(PREFIX),
        "CMAKE_PREFIX_PATH": str(PREFIX),
        "COLCON_HOME": str(home),
    }
    workspace = Workspace(root, environment)
    done = workspace.colcon("build")
    assert done.returncode == 0, done.stdout + done.stderr
    return workspace


@pytest.fixture(scope="module")
def install(workspace) -> Path:
    return workspace.install


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


def test_the_arena_is_installed_with_its_executable(install):
    done = in_workspace(install, 'python3 -c "import edgellm_arena.ros.main as main; print(main.__file__)"')
    assert done.stdout.startswith(str(install)), done.stderr
    done = in_workspace(install, "edgellm_ros/lib/edgellm_ros/arena_node --ros-args -p family:=flying")
    assert done.returncode == 1
    assert done.stderr.startswith("arena: family must be one of "), done.stderr


def test_the_arms_world_is_installed_with_its_contract(install):
    code = "import edgellm_tabletop.units as units; print(units.__file__)"
    done = in_workspace(install, f'python3 -c "{code}"')
    assert done.stdout.startswith(str(install)), done.stderr
    folder = Path(done.stdout.strip()).parent
    assert (folder / "contract.yaml").is_file()
    assert (folder / "meta" / "info.json").is_file()


def test_the_replay_is_an_executable_of_the_package(install):
    done = in_workspace(install, "edgellm_ros/lib/edgellm_ros/replay_node /nowhere --out /nowhere/out")
    assert done.returncode == 2
    assert done.stderr.startswith("edgellm replay: error: ")


def test_launch_files_parameters_views_and_examples_are_installed(install):
    share = install / "edgellm_ros" / "share" / "edgellm_ros"
    for folder in ("launch", "config", "views", "examples"):
        assert sorted(os.listdir(share / folder)) == sorted(
            name for name in os.listdir(ROOT / folder) if not name.startswith("__")
        )


def test_colcon_test_runs_the_tests_that_need_no_engine(workspace):
    done = workspace.colcon("test", "--return-code-on-test-failure", "--event-handlers", "console_direct+")
    assert done.returncode == 0, done.stdout + done.stderr
    results = sorted((workspace.root / "build" / "edgellm_ros" / "test_results").rglob("*.xunit.xml"))
    counts = {path.name.removesuffix(".xunit.xml"): executed(path) for path in results}
    assert {"interfaces", "launch", "parameters", "worker"} <= counts.keys()
    assert all(counts.values()), counts
    assert sum(counts.values()) > 200


def executed(path: Path) -> int:
    """Tests in a result file that were executed."""
    (suite,) = ElementTree.parse(path).getroot().iter("testsuite")
    return int(suite.get("tests")) - int(suite.get("skipped"))
