# SPDX-License-Identifier: Apache-2.0
"""The TensorRT backend and TensorRT's double against NVIDIA's real bindings.

No TensorRT is needed: mypy checks our code with stubs that tools/make_tensorrt_stubs.py generates from the
bindings, and the double has nothing that the bindings do not have.
"""

from __future__ import annotations

import enum
import inspect
import os
import re
import subprocess
import sys
import typing
from importlib.util import find_spec
from pathlib import Path

import pytest

from doubles import tensorrt_double
from doubles.tensorrt_api import STUBS, read_api

pytestmark = pytest.mark.only_on("cpu", reason="nothing here runs on a device")
needs_bindings = pytest.mark.skipif(
    find_spec("tensorrt_bindings") is None,
    reason="tensorrt-cu13-bindings has no wheel for this Python or machine (requirements-test.txt)",
)
ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "tools"
SOURCES = [path for path in sorted((ROOT / "edgellm_ros").rglob("*.py")) if "trt." in path.read_text()]
DOUBLES = {
    name: value
    for name, value in vars(tensorrt_double).items()
    if isinstance(value, type) and value.__module__ == tensorrt_double.__name__
}
PYTHON_TYPES = {
    "SupportsInt": int, "str": str, "bool": bool, "Buffer": bytes, "tuple": tensorrt_double.Dims,
    "list": tensorrt_double.Dims, "None": type(None),
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
]


@pytest.fixture(scope="session")
def api():
    return read_api()


@needs_bindings
def test_the_stubs_are_those_of_the_bindings(tmp_path):
    command = [sys.executable, TOOLS / "make_tensorrt_stubs.py", "--out", tmp_path / "stubs.pyi"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "stubs.pyi").read_text() == STUBS.read_text()


@pytest.fixture(scope="session")
def complaints(request, tmp_path_factory) -> dict[str, list[str]]:
    """Mypy's messages on our modules and on copies with one mistake each: file -> lines."""
    folder = tmp_path_factory.mktemp("planted")
    for path in SOURCES:
        (folder / f"right_{path.name}").write_text(path.read_text())
    for number, (right, wrong) in enumerate(PLANTED):
        for path in SOURCES:
            source = path.read_text()
            if right in source:
                (folder / f"wrong_{number}_{path.name}").write_text(source.replace(right, wrong))
    options = ["--config-file", ROOT / "pyproject.toml", "--cache-dir", request.config.cache.mkdir("mypy")]
    command = [sys.executable, "-m", "mypy", *options, *sorted(folder.glob("*.py"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found: dict[str, list[str]] = {path.name: [] for path in folder.glob("*.py")}
    for line in done.stdout.splitlines():
        if ": error: " in line:
            found[Path(line.partition(":")[0]).name].append(line)
    return found


@pytest.mark.slow
def test_our_code_uses_nothing_that_the_bindings_do_not_have(complaints):
    assert {path.name for path in SOURCES} == {
        "tensorrt_backend.py",
        "tensorrt_library.py",
        "tensorrt_plan.py",
    }
    assert [line for name, lines in complaints.items() if name.startswith("right_") for line in lines] == []


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(PLANTED)), ids=[wrong for _, wrong in PLANTED])
def test_wrong_names_and_arguments_are_found(complaints, number):
    planted = [lines for name, lines in complaints.items() if name.startswith(f"wrong_{number}_")]
    assert planted, "the right text is not in the sources"
    assert any(planted)


def members(double: type) -> list[str]:
    """Return the public members of a class of the double."""
    if issubclass(double, enum.Enum):
        return list(double.__members__)
    names = [*vars(double), *inspect.get_annotations(double)]
    return [name for name in names if not name.startswith("_") or name == "__init__"]


@pytest.mark.parametrize("name", DOUBLES)
def test_the_double_has_nothing_that_the_bindings_do_not_have(api, name):
    real = api[name]
    missing = [member for member in members(DOUBLES[name]) if member not in real]
    assert not missing
    for member in members(DOUBLES[name]):
        method = vars(DOUBLES[name]).get(member)
        # The stubs have no signature of __init__ for classes that only TensorRT itself makes.
        if inspect.isfunction(method) and (real[member] or member != "__init__"):
            assert isinstance(real[member], list), f"{name}.{member} is a property"
            mine = parameters(method)
            assert any(
                [(p.name, wanted(p.type)) for p in signature.parameters[: len(mine)]] == mine
                and all(p.optional for p in signature.parameters[len(mine) :])
                for signature in real[member]
            ), f"{name}.{member}{mine}, the bindings have {real[member]}"


def parameters(method) -> list[tuple[str, object]]:
    hints = typing.get_type_hints(
        method, vars(tensorrt_double), {"Severity": tensorrt_double.ILogger.Severity}
    )
    return [(name, hints.get(name)) for name in inspect.signature(method).parameters if name != "self"]


def wanted(kind: str) -> object:
    if kind == "Severity":
        return tensorrt_double.ILogger.Severity
    return PYTHON_TYPES.get(kind) or DOUBLES.get(kind)


def test_the_double_has_only_what_our_code_uses():
    """Mypy checks our code with the stubs, so the double has only members that mypy checked."""
    source = "\n".join(path.read_text() for path in SOURCES)
    offered = {
        f"{name}.{member}"
        for name, double in DOUBLES.items()
        if not issubclass(double, tuple | bytes | tensorrt_double.ILogger)
        for member in members(double)
        if member != "__init__"
    }
    unused = {name for name in offered if not re.search(rf"\.{name.rpartition('.')[2]}\b", source)}
    of_enums = {"TensorIOMode.NONE", "TensorIOMode.OUTPUT", "TensorLocation.HOST"}
    of_enums |= {f"DataType.{name}" for name in ("INT8", "FP8", "INT4", "FP4", "E8M0")}
    of_enums |= {"LayerType.SHUFFLE"}
    of_enums |= {f"ExecutionContextAllocationStrategy.{name}" for name in ("STATIC", "ON_PROFILE_CHANGE")}
    assert unused == of_enums


PROGRAM = """
import sys, tensorrt_bindings as trt
sys.modules["tensorrt"] = trt
from edgellm_ros.engine.tensorrt_library import library_log, load_library, start
from edgellm_ros.engine.tensorrt_backend import _numpy_type
from edgellm_ros.engine.errors import EngineError

assert load_library() is trt
log = library_log(trt)
log.log(trt.ILogger.Severity.INFO, "not kept")
log.log(trt.ILogger.Severity.WARNING, "first")
assert not log.failed
log.log(trt.ILogger.Severity.ERROR, "second")
assert log.failed and log.take() == "first; second" and not log.failed
for kind in (trt.Runtime, trt.Builder):
    try:
        start(trt, kind)
    except EngineError as error:
        assert "TensorRT 11.4.0.106 does not work here" in str(error)
    else:
        raise AssertionError(kind)
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


@needs_bindings
def test_our_code_works_with_the_bindings_as_far_as_they_go_without_tensorrt(tmp_path):
    sys.path.insert(0, str(TOOLS))
    from make_tensorrt_stubs import build_libraries

    environment = {**os.environ, "LD_LIBRARY_PATH": str(build_libraries(tmp_path)), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
