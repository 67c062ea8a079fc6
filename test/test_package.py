# SPDX-License-Identifier: Apache-2.0
"""Rules of the layout: allowed imports, and a complete package."""

from __future__ import annotations

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "edgellm_ros"
ARENA, TABLETOP = ROOT / "edgellm_arena", ROOT / "edgellm_tabletop"
# Each layer with the layers that it may import.
CORE = {"engine", "kernels", "multimodal", "diffusion", "engine_directory", "fused"}
BELOW_ROS = CORE | {"runtime", "builder", "io", "replay", "voice"}
LAYERS = {
    "engine": set(),
    "kernels": {"engine"},
    "multimodal": {"engine", "kernels"},
    "diffusion": {"engine", "kernels", "multimodal"},
    "engine_directory": {"multimodal", "diffusion"},
    "fused": {"engine", "kernels", "diffusion", "engine_directory", "multimodal"},
    "openpi": {"engine"},
    "runtime": CORE | {"openpi"},
    "messages": CORE | {"runtime", "io"},
    "serving": CORE | {"runtime", "openpi", "messages", "io"},
    "builder": CORE - {"kernels"},
    "io": {"multimodal", "engine_directory"},
    "replay": set(),
    "voice": {"engine", "multimodal"},
    "ros": BELOW_ROS | {"serving"},
    "evaluation": BELOW_ROS | {"ros"},
    "cli": BELOW_ROS | {"ros", "evaluation", "openpi", "messages", "serving"},
}
# Each room of the arena with the rooms that it may import, and with those layers of edgellm_ros.
WORLD = {"world", "words", "speech", "driving", "episodes"}
ARENA_ROOMS = {
    "world": (set(), set()),
    "words": ({"world"}, set()),
    "speech": ({"words"}, {"multimodal", "voice"}),
    "driving": ({"world"}, set()),
    "episodes": (WORLD, {"io"}),
    "evaluation": (WORLD, CORE | {"runtime", "evaluation"}),
    "ros": (WORLD, BELOW_ROS | {"ros"}),
}
ROS_MODULES = {
    "rclpy", "rcl_interfaces", "action_msgs", "builtin_interfaces", "diagnostic_msgs", "geometry_msgs",
    "lifecycle_msgs", "nav_msgs", "rosgraph_msgs", "sensor_msgs", "std_msgs", "std_srvs", "tf2_msgs",
    "trajectory_msgs", "ament_index_python", "unique_identifier_msgs", "visualization_msgs",
}  # fmt: skip
SOURCES, ARENA_SOURCES, TABLETOP_SOURCES = (
    sorted(folder.rglob("*.py")) for folder in (PACKAGE, ARENA, TABLETOP)
)
PATTERNS = ["*.py", "*.cu*", "*.cpp", "*.h", "*.sh", "*.cmake", "*.msg", "*.srv", "*.action", "scripts/*"]
TRACKED_SOURCES = [
    ROOT / path
    for path in subprocess.run(
        ["git", "-C", ROOT, "ls-files", *PATTERNS],
        capture_output=True,
        text=True,
    ).stdout.split()
]


def module_file(name: str) -> Path:
    """Return the file of a module or package of this repository, which need not exist."""
    path = ROOT.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@functools.cache
def imported(path: Path, at_load: bool = False) -> frozenset[str]:
    """Return the modules that a file imports; `at_load`: only those outside functions.

    `from package import name` counts as the module `package.name` if there is one.
    """
    names: set[str] = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                names.update(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                for each in (f"{child.module}.{alias.name}" for alias in child.names):
                    is_module = (
                        each.split(".")[0] in (PACKAGE.name, ARENA.name, TABLETOP.name)
                        and module_file(each).is_file()
                    )
                    names.add(each if is_module else child.module or "")
            if not (at_load and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))):
                visit(child)

    visit(ast.parse(path.read_text()))
    return frozenset(names)


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_one_way(layer):
    allowed = LAYERS[layer] | {layer}
    for path in (PACKAGE / layer).rglob("*.py"):
        for name in imported(path):
            parts = name.split(".")
            if parts[0] == "edgellm_ros" and len(parts) > 1 and parts[1] in LAYERS:
                assert parts[1] in allowed, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("room", ARENA_ROOMS)
def test_imports_between_rooms_of_the_arena_point_one_way(room):
    rooms, layers = ARENA_ROOMS[room]
    allowed = {ARENA.name: rooms | {room}, PACKAGE.name: layers}
    for path in (ARENA / room).rglob("*.py"):
        for name in imported(path):
            root, *parts = name.split(".")
            if root == ARENA.name or (root == PACKAGE.name and parts[0] in LAYERS):
                assert parts[0] in allowed[root], f"{path.relative_to(ROOT)} imports {name}"


def test_only_commands_import_the_worlds_and_only_when_they_run():
    for path in SOURCES:
        names = imported(path, at_load=path.is_relative_to(PACKAGE / "cli"))
        roots = {name.split(".")[0] for name in names}
        assert not {ARENA.name, TABLETOP.name} & roots, path.relative_to(ROOT)


def test_the_worlds_do_not_import_each_other():
    for sources, other in ((ARENA_SOURCES, TABLETOP), (TABLETOP_SOURCES, ARENA)):
        for path in sources:
            assert other.name not in {name.split(".")[0] for name in imported(path)}, path.relative_to(ROOT)


@pytest.mark.parametrize("package", [PACKAGE, ARENA, TABLETOP], ids=lambda package: package.name)
def test_no_folder_holds_a_circle_of_imports(package):
    """In every folder, its files and subfolders can be put in an order of imports."""
    sorters: dict[Path, TopologicalSorter[str]] = defaultdict(TopologicalSorter)
    for path in package.rglob("*.py"):
        for name in imported(path):
            target = module_file(name)
            if name.split(".")[0] != package.name or not target.is_file() or target == path:
                continue
            folder = Path(os.path.commonpath([path.parent, target.parent]))
            ours, theirs = (each.relative_to(folder).parts[0] for each in (path, target))
            sorters[folder].add(ours, theirs)
    for folder, sorter in sorters.items():
        try:
            sorter.prepare()
        except CycleError as error:
            pytest.fail(f"{folder.relative_to(ROOT)}: {' <- '.join(error.args[1])}")


@pytest.mark.slow
def test_only_the_folder_ros_imports_ros():
    for path in SOURCES + ARENA_SOURCES + TABLETOP_SOURCES:
        if any(path.is_relative_to(folder / "ros") for folder in (PACKAGE, ARENA, TABLETOP)):
            continue
        for name in imported(path):
            parts = name.split(".")
            assert parts[0] not in ROS_MODULES, f"{path.relative_to(ROOT)} imports {name}"
            assert parts[:2] not in (["edgellm_ros", part] for part in ("msg", "srv", "action")), path


@pytest.mark.slow
def test_nothing_imports_the_training_code_or_pytorch():
    for path in SOURCES + ARENA_SOURCES + TABLETOP_SOURCES:
        roots = {name.split(".")[0] for name in imported(path)}
        assert not roots & {"training", "torch", "transformers"}, path.relative_to(ROOT)


def test_the_arena_loads_with_numpy_and_opencv_only():
    for path in (path for room in WORLD for path in (ARENA / room).rglob("*.py")):
        for name in imported(path, at_load=True):
            root = name.split(".")[0]
            if root not in sys.stdlib_module_names:
                allowed = {"numpy", "cv2", PACKAGE.name, ARENA.name}
                assert root in allowed, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.slow
def test_the_core_loads_without_ros_gpu_libraries_or_an_inference_library():
    """A fresh interpreter, in which these imports fail, imports all modules.

    Files and folders named cuda... may need CUDA, so no other module may import them at load.
    """
    names = [path.relative_to(ROOT).with_suffix("").parts for path in SOURCES + ARENA_SOURCES]
    modules = [
        ".".join(parts)
        for parts in names
        if parts[1] != "ros"
        and parts[-1] != "__main__"
        and not any(part.startswith("cuda") for part in parts)
    ]
    code = (
        "import importlib, sys\n"
        "libraries = 'torch', 'transformers', 'tensorrt', 'cuda', 'cupy', 'onnxruntime', 'matplotlib'\n"
        "for name in ('rclpy', *libraries):\n"
        "    sys.modules[name] = None\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name.removesuffix('.__init__'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_folder_has_the_name_of_a_generated_module():
    assert not {"msg", "srv", "action"} & {path.stem for path in PACKAGE.iterdir()}


def test_every_source_names_its_licence():
    for path in TRACKED_SOURCES:
        text = path.read_text()
        assert not text or "SPDX-License-Identifier: Apache-2.0" in text[:200], path.relative_to(ROOT)


def test_docstrings_begin_with_a_line_of_at_most_80_characters():
    documented = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    folders = (PACKAGE, ARENA, TABLETOP, "benchmarks", "training", "examples", "launch", "tools", "test")
    long = []
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        nodes = [node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, documented)]
        first = [line for node in nodes for line in (ast.get_docstring(node) or "").splitlines()[:1]]
        long += [f"{path}: {line}" for line in first if len(line) > 80]
    assert not long


def test_modules_of_tests_have_names_of_their_own():
    """Pytest imports them by their names alone."""
    names = [path.name for path in (ROOT / "test").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_modules_with_doubles_of_the_kernels_are_marked():
    sources = {path: path.read_text() for path in (ROOT / "test").glob("*/test_*.py")}
    uses = re.compile(r"import .*\b(HostFused\w+|fused_on_host|fused_head_on_host)\b")
    modules = {path.name for path, source in sources.items() if uses.search(source)}
    marked = {path.name for path, source in sources.items() if "mark.kernel_doubles" in source}
    assert modules == marked != set()


@pytest.mark.slow
def test_a_wheel_has_the_code_and_the_command_and_needs_no_ros(tmp_path):
    source = tmp_path / "source"  # a copy, because setuptools writes beside the sources
    shutil.copytree(PACKAGE, source / "edgellm_ros", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "package.xml", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True)
    (wheel,) = tmp_path.glob("edgellm-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        for path in (*SOURCES, *PACKAGE.rglob("*.cu"), *PACKAGE.rglob("*.cuh"), *PACKAGE.rglob("*.txt")):
            assert path.relative_to(ROOT).as_posix() in names
        (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
        assert "edgellm = edgellm_ros.__main__:main" in archive.read(entry_points).decode()
        (metadata,) = (name for name in names if name.endswith("METADATA"))
        assert "rclpy" not in archive.read(metadata).decode()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "data"),
    [(ARENA, ()), (TABLETOP, ("contract.yaml", "meta/info.json"))],
    ids=["arena", "tabletop"],
)
def test_the_wheel_of_a_world_has_its_code_and_needs_this_version_of_edgellm(tmp_path, world, data):
    source = tmp_path / "source"
    shutil.copytree(world, source, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True)
    (wheel,) = tmp_path.glob(f"{world.name}-*.whl")
    version = ElementTree.parse(ROOT / "package.xml").findtext("version")
    with zipfile.ZipFile(wheel) as archive:
        code = {name for name in archive.namelist() if ".dist-info/" not in name}
        files = [*world.rglob("*.py"), *(world / name for name in data)]
        assert code == {path.relative_to(ROOT).as_posix() for path in files}
        (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    assert {f"Version: {version}", f"Requires-Dist: edgellm=={version}"} <= set(lines)


@pytest.mark.slow
def test_no_test_imports_a_test():
    """Shared code is in test/fixtures and test/doubles."""
    for path in (ROOT / "test").rglob("*.py"):
        for name in imported(path):
            is_test = any(part.startswith("test_") for part in name.split("."))
            assert not is_test, f"{path.relative_to(ROOT)} imports {name}"


def test_package_xml_names_every_ros_package_that_is_imported():
    declared = {
        element.text
        for element in ElementTree.parse(ROOT / "package.xml").getroot()
        if element.tag in ("depend", "exec_depend")
    }
    folders = (PACKAGE / "ros", ARENA / "ros", TABLETOP / "ros", ROOT / "launch")
    files = [*(path for folder in folders for path in folder.rglob("*.py")), *(ROOT / "scripts").iterdir()]
    roots = {name.split(".")[0] for path in files for name in imported(path)}
    assert roots & (ROS_MODULES | {"launch", "launch_ros"}) <= declared


def test_pip_may_keep_the_numpy_opencv_and_pillow_of_ubuntu_24_04():
    projects = ROOT / "setup.py", ARENA / "pyproject.toml", TABLETOP / "pyproject.toml"
    text = "".join(path.read_text() for path in projects)
    ranges = re.findall(r'"(numpy|opencv-python-headless|pillow)>=([0-9.]+)', text)
    ubuntu = {"numpy": "1.26.4", "opencv-python-headless": "4.6.0", "pillow": "10.2.0"}
    assert {name for name, _ in ranges} == ubuntu.keys()
    for name, version in ranges:
        assert numbers(version) <= numbers(ubuntu[name]), name


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


# of the runtime, each above those before it
ROOMS = ("text", "adapters", "grammar", "prompt", "prefix", "batch", "engines", "decoding")
BELOW_ROOMS = {"request", "conversation", "metrics"}  # files at the root of the runtime, for all rooms


@pytest.mark.parametrize("room", ROOMS)
def test_imports_between_rooms_of_the_runtime_point_down(room):
    allowed = {*ROOMS[: ROOMS.index(room) + 1], *BELOW_ROOMS}
    for path in (PACKAGE / "runtime" / room).rglob("*.py"):
        for name in imported(path):
            parts = name.split(".")
            if parts[:2] == ["edgellm_ros", "runtime"]:
                assert parts[2] in allowed, f"{path.relative_to(ROOT)} imports {name}"


def test_the_client_says_what_is_missing_where_ros_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "rclpy", None)
    with pytest.raises(ImportError, match="no Python module rclpy: PlanClient needs ROS 2"):
        from edgellm_ros.client import PlanClient  # noqa: F401
