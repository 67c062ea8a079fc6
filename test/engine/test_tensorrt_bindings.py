# SPDX-License-Identifier: Apache-2.0
"""Names and arguments that our TensorRT code uses, against NVIDIA's real bindings.

No TensorRT is needed: tensorrt_api.py reads the interface of the real bindings, tensorrt_uses.py finds what
our code uses. And the double that the runtime's tests run on has nothing that the real one has not.
"""

from __future__ import annotations

import enum
import inspect
import os
import subprocess
import sys
import typing
from importlib.util import find_spec
from pathlib import Path

import pytest
from tensorrt_uses import Uses

from doubles import tensorrt_double
from doubles.tensorrt_api import BINDINGS, Api, build_stubs, read_api

pytestmark = [
    pytest.mark.skipif(
        find_spec(BINDINGS) is None,
        reason="tensorrt-cu13-bindings has no wheel for this Python or machine (requirements-test.txt)",
    ),
    pytest.mark.only_on("cpu", reason="nothing here runs on a device"),
]
ROOT = Path(__file__).parents[2]
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


@pytest.fixture(scope="session")
def api(tmp_path_factory) -> Api:
    return read_api(tmp_path_factory.mktemp("stubs"))


def test_our_code_uses_nothing_that_the_bindings_do_not_have(api):
    found = {path.name: Uses(path.read_text(), api) for path in SOURCES}
    assert {path.name for path in SOURCES} == {
        "tensorrt_backend.py",
        "tensorrt_library.py",
        "tensorrt_plan.py",
    }
    assert {name: uses.problems for name, uses in found.items() if uses.problems} == {}
    assert sum(len(uses.uses) for uses in found.values()) > 60


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("context.set_tensor_address(", "context.set_tensor_adress("),
        ("ExecutionContextAllocationStrategy.USER_MANAGED", "ExecutionContextAllocationStrategy.USER_MANGED"),
        ("trt.DataType.HALF", "trt.DataType.FLOAT16"),
        ("set_device_memory(address, size)", "set_device_memory(address)"),
        ("set_device_memory(address, size)", "set_device_memory(address, nbytes=size)"),
        ("self._engine.num_optimization_profiles", "self._engine.num_profiles"),
        ("deserialize_cuda_engine(plan)", "deserialize_cuda_engine(plan, 5)"),
        ("trt.BuilderFlag.TF32", "trt.BuilderFlag.TF_32"),
        ("config.create_timing_cache(known), False)", "config.create_timing_cache(known))"),
        ("config.get_timing_cache().serialize()", "config.get_timing_cache().to_bytes()"),
        ("error.node_operator()", "error.operator()"),
        ("profile.set_shape(tensor.name, low, tuned, high)", "profile.set_shape(tensor.name, low, high)"),
        ("tensor.shape", "tensor.dims"),
        ("layer.attention.decomposable", "layer.attention.decompose"),
        ("trt.LayerType.ATTENTION_OUTPUT", "trt.LayerType.ATTENTION"),
        ("trt.ILogger.Severity.WARNING", "trt.ILogger.Severity.WARN"),
    ],
)
def test_a_wrong_name_or_argument_is_found(api, right, wrong):
    sources = [path.read_text() for path in SOURCES]
    assert any(right in source for source in sources)
    assert any(Uses(source.replace(right, wrong), api).problems for source in sources)


def members(double: type) -> list[str]:
    """What a class of the double offers."""
    if issubclass(double, enum.Enum):
        return list(double.__members__)
    names = [*vars(double), *inspect.get_annotations(double)]
    return [name for name in names if not name.startswith("_") or name == "__init__"]


@pytest.mark.parametrize("name", DOUBLES)
def test_the_double_has_nothing_that_the_bindings_do_not_have(api, name):
    real = api.classes[name]
    missing = [member for member in members(DOUBLES[name]) if member not in real]
    assert not missing
    for member in members(DOUBLES[name]):
        method = vars(DOUBLES[name]).get(member)
        if inspect.isfunction(method) and (real[member] or member != "__init__"):  # else others make it
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


def test_what_the_double_has_is_what_our_code_uses(api):
    """So the search above has found the uses: none of them is hidden behind a type that it cannot follow."""
    used = set().union(*(Uses(path.read_text(), api).uses for path in SOURCES))
    offered = {
        f"{name}.{member}"
        for name, double in DOUBLES.items()
        if not issubclass(double, tuple | bytes | tensorrt_double.ILogger)
        for member in members(double)
        if member != "__init__"
    }
    of_enums = {"TensorIOMode.NONE", "TensorIOMode.OUTPUT", "TensorLocation.HOST"}
    of_enums |= {f"DataType.{name}" for name in ("INT8", "FP8", "INT4", "FP4", "E8M0")}
    of_enums |= {"LayerType.SHUFFLE"}
    of_enums |= {f"ExecutionContextAllocationStrategy.{name}" for name in ("STATIC", "ON_PROFILE_CHANGE")}
    assert offered - used == of_enums


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


def test_our_code_works_with_the_bindings_as_far_as_they_go_without_tensorrt(tmp_path):
    environment = {**os.environ, "LD_LIBRARY_PATH": str(build_stubs(tmp_path)), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
