# SPDX-License-Identifier: Apache-2.0
"""Errors of the real TensorRT for RTX: its words, and the meaning given to them.

A plan can be loaded only on a GPU. What the library would say there is read in the library itself; what it
says of a damaged plan, and without a GPU, it says here.
"""

from __future__ import annotations

import importlib
import mmap
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from edgellm_ros.engine.errors import DeviceLostError, DeviceMemoryError, EngineError
from edgellm_ros.engine.tensorrt.errors import engine_error, plan_error
from edgellm_ros.engine.tensorrt.library import library_log
from edgellm_ros.engine.tensorrt.plan_file import RTX, PlanFile
from fixtures.graphs import FLOAT, helper, save_model

pytestmark = [
    pytest.mark.only_on("cpu", reason="nothing here runs on a device"),
    pytest.mark.skipif(
        find_spec("tensorrt_rtx") is None,
        reason="tensorrt_rtx_cu13 has no wheel for this Python or machine (requirements-test.txt)",
    ),
]
ROOT = Path(__file__).parents[2]
PLAN = PlanFile(
    path=Path("engine/llm/a.plan"),
    library=RTX,
    version="1.7.1.116",
    gpus=("sm_86", "sm_89"),
    version_compatible=False,
    bytes=9,
    graph_sha256="",
    profiles=(),
)
GPU = "made for another GPU or platform: the plan is for sm_86 and sm_89; "
VERSION = "another TensorRT made the plan: "
NO_PLAN = "the file is no plan of this library, or damaged: "
DAMAGED = "the file is damaged or no plan: "
DRIVER = "the GPU or its driver is the reason, not the plan"
CODE = "the plan contains code, which the user has not allowed: "
WORDS = [
    ("The engine cannot run on this GPU, which has compute capability ", GPU),
    ("TensorRT-RTX does not support this compute capability, so the engine cannot be rebuilt for it.", GPU),
    ("Rebuild the engine for compute capability ", GPU),
    ("The engine plan file is generated on an incompatible device, expecting compute ", GPU),
    ("The current device is not compatible with this hardware-compatible engine.", GPU),
    ("The engine has been created with TensorRT-RTX version ", VERSION),
    (". Rebuild the engine with the same version of TensorRT-RTX as the current runtime.", VERSION),
    (" Ensure that the engine was created with the same version of TensorRT-RTX as the current", VERSION),
    ("The engine plan file is not compatible with this version of TensorRT, expecting library", VERSION),
    ("TensorRT plan major version does not match runtime major version.", VERSION),
    ("Cannot deserialize engine with lean runtime since IRuntime::getEngineHostCodeAllowed()", CODE),
    ("Serialization assertion header.magicTag == kEXPECTED_MAGIC_TAG failed.", NO_PLAN),
    ("Serialization assertion plan.header.size == blobSize failed.", DAMAGED),
    ("Assertion bufferSize >= minBufferSize failed.", DAMAGED),
    ("Cannot deserialize with an empty memory buffer.", DAMAGED),
    ("Not a valid plan stream.", DAMAGED),
    ("No engine found in plan.", DAMAGED),
    ("Size specified in header does not match archive size", DAMAGED),
    ("Assertion endOfArchive == kEND_OF_ARCHIVE_MARKER failed.", DAMAGED),
    ("Error reading CUDA GPU properties: ", DRIVER),
    ("Cuda Runtime", DRIVER),
    ("Cuda Driver", DRIVER),
    ("CUDA driver version is insufficient for CUDA runtime version", DRIVER),
    ("CUDA initialization failure with error: ", DRIVER),
    ("Failed to query CUDA driver version. Please check Nvidia GPU driver installation.", DRIVER),
    ("The engine has been created with CUDA driver version ", DRIVER),
]
KINDS = [
    ("but the current GPU only has ", DeviceMemoryError),
    ("GPU memory allocation failed", DeviceMemoryError),
    (" bytes) could not be allocated.", DeviceMemoryError),
    ("OutOfMemory", DeviceMemoryError),
    ("FAILED_ALLOCATION", DeviceMemoryError),
    ("an illegal memory access was encountered", DeviceLostError),
    ("unspecified launch failure", DeviceLostError),
    ("misaligned address", DeviceLostError),
    ("device-side assert triggered", DeviceLostError),
    ("Scratch memory allocation failed as requested memory ", EngineError),  # "Falling back to regular"
]


@pytest.fixture(scope="module")
def contents():
    """The library's file."""
    (folder,) = find_spec("tensorrt_rtx_libs").submodule_search_locations
    with (
        (Path(folder) / "libtensorrt_rtx.so.1").open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as found,
    ):
        yield found


@pytest.mark.parametrize("words", [words for words, _ in [*WORDS, *KINDS]])
def test_the_words_are_in_the_library(contents, words):
    assert contents.find(words.encode()) >= 0


@pytest.mark.parametrize(("words", "meaning"), WORDS)
def test_the_words_get_their_meaning(words, meaning):
    reason = f"IRuntime::deserializeCudaEngine: Error Code 1: Error ({words})"
    error = str(plan_error(PLAN, "TensorRT for RTX 1.7.1.116", "NVIDIA RTX 4090 (sm_89)", reason))
    before, _, explained = error.rpartition(" (")
    assert reason in before
    assert meaning in explained


@pytest.mark.parametrize(("words", "kind"), KINDS)
def test_the_words_give_a_kind_of_error(words, kind):
    assert type(engine_error(f"Error Code 1: Error ({words})")) is kind


@pytest.fixture(scope="module")
def plan(tmp_path_factory) -> bytes:
    """A plan that the library built."""
    rtx = importlib.import_module("tensorrt_rtx")
    log = library_log(rtx)
    path = tmp_path_factory.mktemp("plan") / "model.onnx"
    save_model(path, [helper.make_node("Neg", ["x"], ["y"])], {"x": (FLOAT, [2])}, {"y": (FLOAT, [2])})
    builder = rtx.Builder(log)
    network = builder.create_network()
    parser = rtx.OnnxParser(network, log)
    assert parser.parse_from_file(str(path))
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    assert config.set_compute_capability(rtx.ComputeCapability.SM89, 0)
    return bytes(memoryview(builder.build_serialized_network(network, config)))


@pytest.mark.parametrize(
    ("damage", "meaning"),
    [
        pytest.param(lambda plan: b"", DAMAGED, id="empty"),
        pytest.param(lambda plan: plan[:28], DAMAGED, id="a part of the header"),
        pytest.param(lambda plan: plan[:64], DAMAGED, id="the header alone"),
        pytest.param(lambda plan: plan[:-1], DAMAGED, id="truncated"),
        pytest.param(lambda plan: plan + b"x", DAMAGED, id="too long"),
        pytest.param(lambda plan: b"no plan at all " * 100, NO_PLAN, id="text"),
        pytest.param(lambda plan: bytes(1000), NO_PLAN, id="zeros"),
        pytest.param(lambda plan: b"ftrt" + plan[4:], NO_PLAN, id="of TensorRT"),
    ],
)
def test_what_the_library_says_of_a_damaged_plan_is_explained(plan, damage, meaning):
    rtx = importlib.import_module("tensorrt_rtx")
    log = library_log(rtx)
    runtime = rtx.Runtime(log)
    log.take()
    assert runtime.deserialize_cuda_engine(damage(plan)) is None
    # Without a GPU, the library adds to each error that CUDA does not work.
    (reason,) = [line for line in log.take().split("; ") if "catchCudaError" not in line]
    assert f"({meaning}" in str(plan_error(PLAN, "TensorRT for RTX 1.7.1.116", "a GPU", reason))


LOAD = """
import sys
from pathlib import Path
import tensorrt_rtx
from edgellm_ros.engine.tensorrt.plan_file import PlanFile
from edgellm_ros.engine.tensorrt.errors import plan_error
from edgellm_ros.engine.tensorrt.library import library_log, start
log, path = library_log(tensorrt_rtx), Path(sys.argv[1])
assert start(tensorrt_rtx, tensorrt_rtx.Runtime).deserialize_cuda_engine(path.read_bytes()) is None
plan = PlanFile(
    path=path,
    library="tensorrt_rtx",
    version="1.7.1.116",
    gpus=("sm_89",),
    version_compatible=False,
    bytes=9,
    graph_sha256="",
    profiles=(),
)
print(plan_error(plan, "TensorRT for RTX", "a GPU", log.take()))
"""


def test_a_missing_gpu_is_not_reported_as_a_damaged_plan(plan, tmp_path):
    (tmp_path / "a.plan").write_bytes(plan)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", LOAD, tmp_path / "a.plan"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert DRIVER in done.stdout
    assert "damaged" not in done.stdout
