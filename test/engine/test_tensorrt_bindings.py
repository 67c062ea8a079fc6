# SPDX-License-Identifier: Apache-2.0
"""Our use of TensorRT, and TensorRT's doubles, against NVIDIA's real bindings.

The bindings are those of `tensorrt` and `tensorrt_rtx`. mypy checks our code with stubs that
tools/make_tensorrt_stubs.py generates from them, and a double has nothing that they do not have. Of
`tensorrt`, only the bindings are installed; `tensorrt_rtx` is complete.
"""

from __future__ import annotations

import enum
import inspect
import os
import re
import subprocess
import sys
import typing
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from doubles import tensorrt_double, tensorrt_rtx_double
from doubles.tensorrt_api import STUBS, read_api

pytestmark = [
    pytest.mark.only_on("cpu", reason="nothing here runs on a device"),
    pytest.mark.skipif(
        not all(path.is_file() for path in STUBS.values()),
        reason="the stubs are missing: `make lint` generates them, where NVIDIA has wheels for the computer",
    ),
]
needs_bindings = pytest.mark.skipif(
    find_spec("tensorrt_bindings") is None,
    reason="tensorrt-cu13-bindings has no wheel for this Python or machine (requirements-test.txt)",
)
needs_rtx = pytest.mark.skipif(
    find_spec("tensorrt_rtx") is None,
    reason="tensorrt_rtx_cu13 has no wheel for this Python or machine (requirements-test.txt)",
)
ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "tools"
IMPORT = re.compile(r"^ *import (tensorrt(?:_rtx)?) as ", re.MULTILINE)
SOURCES = {
    "_".join(path.relative_to(ROOT / "edgellm_ros").parts): path.read_text()
    for path in sorted((ROOT / "edgellm_ros").rglob("*.py"))
    if IMPORT.search(path.read_text())
}
# Doubles, and the libraries that have everything that the double has
DOUBLES = [
    (tensorrt_double, "tensorrt"),
    (tensorrt_double, "tensorrt_rtx"),
    (tensorrt_rtx_double, "tensorrt_rtx"),
]
PYTHON_TYPES = {
    "SupportsInt": int, "str": str, "bool": bool, "Buffer": bytes, "tuple": tensorrt_double.Dims,
    "list": tensorrt_double.Dims, "None": type(None), "Severity": tensorrt_double.ILogger.Severity,
}  # fmt: skip
PLANTED = [
    ("context.set_tensor_address(", "context.set_tensor_adress("),
    ("return library\n", "return library.__version__\n"),
    ("library.Runtime)", "library.Engine)"),
    ("ExecutionContextAllocationStrategy.USER_MANAGED", "ExecutionContextAllocationStrategy.USER_MANGED"),
    ("library.DataType.HALF", "library.DataType.FLOAT16"),
    ("set_device_memory(address, size)", "set_device_memory(address)"),
    ("set_device_memory(address, size)", "set_device_memory(address, nbytes=size)"),
    ("self._engine.num_optimization_profiles", "self._engine.num_profiles"),
    ("deserialize_cuda_engine(plan)", "deserialize_cuda_engine(plan, 5)"),
    ("library.BuilderFlag.TF32", "library.BuilderFlag.TF_32"),
    ("config.create_timing_cache(known), False)", "config.create_timing_cache(known))"),
    ("config.get_timing_cache().serialize()", "config.get_timing_cache().to_bytes()"),
    ("error.node_operator()", "error.operator()"),
    ("profile.set_shape(tensor.name, low, tuned, high)", "profile.set_shape(tensor.name, low, high)"),
    ("tensor.shape", "tensor.dims"),
    (".attention.decomposable", ".attention.decompose"),
    ("library.LayerType.ATTENTION_OUTPUT", "library.LayerType.ATTENTION"),
    ("logger_class.Severity.WARNING", "logger_class.Severity.WARN"),
    ("config.num_compute_capabilities = len", "config.num_compute_capability = len"),
    ("set_compute_capability(capability, i)", "set_compute_capability(gpu, i)"),
    (".create_runtime_config().create_runtime_cache()", ".create_runtime_cache()"),
    ("config.set_runtime_cache(self._cache)", "config.set_runtime_cache(self._cache.serialize())"),
    ("library.BuilderFlag.REQUIRE_USER_ALLOCATION", "library.BuilderFlag.USER_ALLOCATION"),
    ("._strategies.EAGER", "._strategies.EARLY"),
]
# What only one library has, in place of what both have
ONLY_IN = [
    ("tensorrt", "network.num_inputs", "network.has_implicit_batch_dimension"),
    ("tensorrt_rtx", "library.BuilderFlag.TF32", "library.BuilderFlag.REQUIRE_USER_ALLOCATION"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    [pytest.param("tensorrt", marks=needs_bindings), pytest.param("tensorrt_rtx", marks=needs_rtx)],
)
def test_the_stubs_are_those_of_the_bindings(module, tmp_path):
    command = [sys.executable, TOOLS / "make_tensorrt_stubs.py", module, "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / module / "__init__.pyi").read_text() == STUBS[module].read_text()


@pytest.fixture(scope="session")
def complaints(request, tmp_path_factory) -> dict[str, dict[str, list[str]]]:
    """Mypy's messages on the modules and on copies with one mistake each.

    Keys are the library, then the file; values are lines.
    """
    found = {}
    for library in STUBS:
        folder = tmp_path_factory.mktemp(library)
        for name, source in SOURCES.items():
            # What does not import `tensorrt` is for `tensorrt_rtx` only.
            if library == "tensorrt" and library not in IMPORT.findall(source):
                continue
            (folder / f"right_{name}").write_text(source)
            planted = {f"wrong_{number}": texts for number, texts in enumerate(PLANTED)}
            planted |= {f"only_{number}": texts for number, (_, *texts) in enumerate(ONLY_IN)}
            for prefix, (right, wrong) in planted.items():
                if right in source:
                    (folder / f"{prefix}_{name}").write_text(source.replace(right, wrong))
        found[library] = run_mypy(library, folder, ROOT / ".mypy_cache")
    return found


def run_mypy(library: str, folder: Path, cache: Path) -> dict[str, list[str]]:
    """Check the files of a folder with mypy; return the errors of each.

    In this folder, `tensorrt` is the given library.
    """
    environment = dict(os.environ)
    if library != "tensorrt":
        stubs = folder / "typings" / "tensorrt"
        stubs.mkdir(parents=True)
        (stubs / "__init__.pyi").write_text(f"from {library} import *\n__version__: str\n")
        environment["MYPYPATH"] = str(stubs.parent)
    # A cast between the libraries is redundant where one takes the place of the other.
    options = ["--config-file", ROOT / "pyproject.toml", "--cache-dir", cache, "--no-warn-redundant-casts"]
    command = [sys.executable, "-m", "mypy", *options, *sorted(folder.glob("*.py"))]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found: dict[str, list[str]] = {path.name: [] for path in folder.glob("*.py")}
    for line in done.stdout.splitlines():
        if ": error: " in line:
            found[Path(line.partition(":")[0]).name].append(line)
    return found


def of_files(found: dict[str, list[str]], prefix: str) -> list[list[str]]:
    """Return the complaints about each file whose name has the prefix."""
    return [lines for name, lines in found.items() if name.startswith(prefix)]


@pytest.mark.slow
@pytest.mark.parametrize("library", STUBS)
def test_our_code_uses_nothing_that_the_bindings_do_not_have(complaints, library):
    assert set(SOURCES) >= {
        "engine_tensorrt_backend.py",
        "engine_tensorrt_library.py",
        "builder_tensorrt_plan.py",
    }
    assert [line for lines in of_files(complaints[library], "right_") for line in lines] == []


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(PLANTED)), ids=[wrong for _, wrong in PLANTED])
def test_wrong_names_and_arguments_are_found(complaints, number):
    planted = {library: of_files(found, f"wrong_{number}_") for library, found in complaints.items()}
    assert planted["tensorrt_rtx"], "the right text is not in the sources"
    assert [library for library, files in planted.items() if files and not any(files)] == []


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(ONLY_IN)), ids=[member for *_, member in ONLY_IN])
def test_what_one_library_does_not_have_is_found(complaints, number):
    planted = {library: of_files(found, f"only_{number}_") for library, found in complaints.items()}
    assert all(planted.values()), "the right text is not in the sources"
    assert [library for library, files in planted.items() if not any(files)] == [ONLY_IN[number][0]]


def members(double: type) -> list[str]:
    """Return the public members of a class of the double."""
    if issubclass(double, enum.Enum):
        return list(double.__members__)
    names = [*vars(double), *inspect.get_annotations(double)]
    return [name for name in names if not name.startswith("_") or name == "__init__"]


def classes(double: ModuleType) -> dict[str, type]:
    """Return a double's classes: its own and those of the double that it extends."""
    return {
        name: value
        for name, value in vars(double).items()
        if isinstance(value, type) and value.__module__ in STUBS
    }


def own_classes(double: ModuleType) -> dict[str, type]:
    return {name: value for name, value in classes(double).items() if value.__module__ == double.__name__}


@pytest.fixture(scope="session")
def apis():
    return {library: read_api(stubs) for library, stubs in STUBS.items()}


@pytest.mark.parametrize(
    "double, library, name",
    [(double, library, name) for double, library in DOUBLES for name in own_classes(double)],
)
def test_the_double_has_nothing_that_the_bindings_do_not_have(apis, double, library, name):
    real, mock = apis[library][name], own_classes(double)[name]
    missing = [member for member in members(mock) if member not in real]
    assert not missing
    for member in members(mock):
        method = vars(mock).get(member)
        # The stubs have no signature of __init__ for classes that only TensorRT itself makes.
        if inspect.isfunction(method) and (real[member] or member != "__init__"):
            assert isinstance(real[member], list), f"{name}.{member} is a property"
            mine, known = parameters(method, double), {**classes(double), **PYTHON_TYPES}
            assert any(
                [(p.name, python_type(p.type, known)) for p in signature.parameters[: len(mine)]] == mine
                and all(p.optional for p in signature.parameters[len(mine) :])
                for signature in real[member]
            ), f"{name}.{member}{mine}, the bindings have {real[member]}"


def python_type(name: str, known: Mapping[str, type]) -> object:
    """Return the type that a name in the stubs means for a double.

    A name may have the form "IRuntimeConfig | None".
    """
    kind = known.get(name.removesuffix(" | None"))
    return kind | None if kind and name.endswith(" | None") else kind


def parameters(method, double: ModuleType) -> list[tuple[str, object]]:
    hints = typing.get_type_hints(method, vars(double), {"Severity": tensorrt_double.ILogger.Severity})
    return [(name, hints.get(name)) for name in inspect.signature(method).parameters if name != "self"]


def test_the_doubles_have_only_what_our_code_uses():
    """Mypy checks the package with the stubs, and thereby every member of the doubles."""
    source = "\n".join(SOURCES.values())
    offered = {
        f"{name}.{member}"
        for name, double in {**own_classes(tensorrt_double), **own_classes(tensorrt_rtx_double)}.items()
        if not issubclass(double, tuple | bytes | tensorrt_double.ILogger)
        for member in members(double)
        if member != "__init__"
    }
    unused = {name for name in offered if not re.search(rf"\.{name.rpartition('.')[2]}\b", source)}
    of_enums = {"TensorIOMode.NONE", "TensorIOMode.OUTPUT", "TensorLocation.HOST"}
    of_enums |= {f"DataType.{name}" for name in ("INT8", "FP8", "INT4", "FP4", "E8M0")}
    of_enums |= {"LayerType.SHUFFLE", "DynamicShapesKernelSpecializationStrategy.NONE"}
    of_enums |= {f"ComputeCapability.{name}" for name in tensorrt_rtx_double.ComputeCapability.__members__}
    of_enums |= {f"ExecutionContextAllocationStrategy.{name}" for name in ("STATIC", "ON_PROFILE_CHANGE")}
    assert unused == of_enums


PROGRAM = """
import sys, {module} as trt
sys.modules["tensorrt"] = trt
from edgellm_ros.engine.tensorrt.library import library_log, load_library, start
from edgellm_ros.engine.tensorrt.backend import _numpy_type
from edgellm_ros.engine.errors import EngineError

log = library_log(trt)
log.log(trt.ILogger.Severity.INFO, "not kept")
log.log(trt.ILogger.Severity.WARNING, "first")
assert not log.failed
log.log(trt.ILogger.Severity.ERROR, "second")
assert log.failed and log.take() == "first; second" and not log.failed
kinds = [_numpy_type(trt, kind) for kind in (trt.DataType.HALF, trt.DataType.BF16)]
assert list(map(str, kinds)) == ["float16", "bfloat16"]
assert _numpy_type(trt, trt.DataType.FP8) is None
assert 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED) > 0
description = trt.PluginTensorDesc()
description.dims = (1, -1, 4)  # a tuple does where a Dims is wanted, and Dims become tuples
assert tuple(description.dims) == (1, -1, 4)
description.__class__ = trt.DynamicPluginTensorDesc  # as is done to layers
description.__class__ = trt.PluginTensorDesc
"""
WITHOUT_LIBRARIES = """
trt.__name__ = "tensorrt"
assert load_library("tensorrt") is trt
for kind in (trt.Runtime, trt.Builder):
    try:
        start(trt, kind)
    except EngineError as error:
        assert "TensorRT 11.4.0.106 does not work here" in str(error)
    else:
        raise AssertionError(kind)
"""
WITH_LIBRARIES = """
assert load_library("tensorrt_rtx") is trt
builder, runtime = start(trt, trt.Builder), start(trt, trt.Runtime)
config = builder.create_builder_config()
config.num_compute_capabilities = 1
assert config.set_compute_capability(trt.ComputeCapability.SM86, 0)
validity, reasons = runtime.get_engine_validity(b"no plan")
assert validity == trt.EngineValidity.INVALID
assert reasons & int(trt.EngineInvalidityDiagnostics.MALFORMED_ENGINE)
assert runtime.deserialize_cuda_engine(b"no plan") is None and log.failed
"""


def run_program(program: str, **variables: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@needs_bindings
def test_our_code_works_with_the_bindings_as_far_as_they_go_without_tensorrt(tmp_path):
    sys.path.insert(0, str(TOOLS))
    from make_tensorrt_stubs import build_libraries

    program = PROGRAM.format(module="tensorrt_bindings") + WITHOUT_LIBRARIES
    run_program(program, LD_LIBRARY_PATH=str(build_libraries(tmp_path)))


@needs_rtx
def test_our_code_works_with_tensorrt_for_rtx():
    run_program(PROGRAM.format(module="tensorrt_rtx") + WITH_LIBRARIES)
