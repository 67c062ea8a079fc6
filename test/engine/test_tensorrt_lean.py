# SPDX-License-Identifier: Apache-2.0
"""Errors of TensorRT's real lean runtime through our backend.

Without a GPU only one thing can be tested: a clear error, and a process that stays alive.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import pytest

from edgellm_ros.engine.device import open_device
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.tensorrt.errors import BAD_PLAN, GPU_REASON
from edgellm_ros.engine.tensorrt.plan_file import TENSORRT, PlanFile, graph_sha256, plan_path, write_plan
from fixtures.graphs import linear_with_cache

BINDINGS = "tensorrt_lean_bindings"
PYTHONPATH = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
VERSION = (11, 4, 0, 106)
pytestmark = pytest.mark.skipif(
    find_spec(BINDINGS) is None or find_spec("tensorrt_lean_libs") is None,
    reason="the lean runtime has no wheel for this Python or machine (requirements-test.txt)",
)


def gpu() -> str:
    """Return the architecture of the GPU, "" without a GPU."""
    try:
        return open_device("tensorrt", allow_plan_code=True).arch
    except EngineError:
        return ""


ON_GPU = pytest.mark.skipif(not gpu(), reason="needs an NVIDIA GPU")

PROGRAM = """
import sys, tensorrt_lean_bindings
sys.modules["tensorrt_lean"] = tensorrt_lean_bindings
tensorrt_lean_bindings.__name__ = "tensorrt_lean"
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.tensorrt.library import load_library, start
for _ in range(2):
    try:
        start(load_library("tensorrt_lean"), tensorrt_lean_bindings.Runtime)
    except EngineError as error:
        print(error)
"""


@pytest.mark.slow
def test_a_missing_gpu_is_an_error_and_the_process_goes_on():
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("lean runtime 11.4.0.106 does not work here: createInferRuntime") == 2
    assert "CUDA initialization failure" in done.stdout


@pytest.mark.parametrize(
    "words",
    [
        "Cuda Runtime",
        "Cuda Driver",
        "CUDA initialization failure with error: ",
        "Serialization assertion plan.header.size == blobSize failed.",
        "Cannot deserialize empty blob.",
        "Not a valid plan stream.",
        "No engine found in plan.",
        "not compatible with this version of TensorRT, expecting library version ",
        "TensorRT plan major version does not match runtime major version.",
        "incompatible serialization version (",
        "generated on an incompatible device, expecting compute ",
        "Expected compute capability >=",
        "Platform specific tag mismatch detected.",
    ],
)
def test_the_words_that_our_errors_explain_are_in_the_library(words):
    folder = Path(find_spec("tensorrt_lean_libs").submodule_search_locations[0])
    (library,) = folder.glob("libnvinfer_lean.so.*")
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as contents:
        assert contents.find(words.encode()) >= 0
    assert any(
        word in words.lower() for word in (*GPU_REASON, *(word for found, _ in BAD_PLAN for word in found))
    )


OPEN = """
import sys, tensorrt_lean_bindings
sys.modules["tensorrt"] = sys.modules["tensorrt_rtx"] = None  # as if they were not installed
sys.modules["tensorrt_lean"] = tensorrt_lean_bindings
tensorrt_lean_bindings.__name__ = "tensorrt_lean"
from edgellm_ros.engine.device import open_device
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.executor import EngineExecutor
device = open_device("tensorrt", allow_plan_code=True)
for _ in range(2):
    try:
        EngineExecutor.open(sys.argv[1], device)
    except EngineError as error:
        print("refused:", error)
tensor = device.zeros((3,), "float32")
print("device works:", device.download(tensor).tolist())
"""


@pytest.fixture
def opened(tmp_path):
    """Function: the output of a process that opens such a plan twice.

    The process uses the device after that.
    """

    def run(contents: bytes | None) -> str:
        model = tmp_path / "engine" / "llm" / "model.onnx"
        model.parent.mkdir(parents=True)
        onnx.save(linear_with_cache(), model)
        if contents is not None:
            version = ".".join(map(str, VERSION))
            path, sha256 = plan_path(model, [gpu()], TENSORRT, version, True), graph_sha256(model)
            plan = PlanFile(
                path=path,
                library=TENSORRT,
                version=version,
                gpus=(gpu(),),
                version_compatible=True,
                bytes=len(contents),
                graph_sha256=sha256,
                profiles=(),
            )
            write_plan(plan, memoryview(contents))
        environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
        done = subprocess.run(
            [sys.executable, "-c", OPEN, model], env=environment, capture_output=True, text=True, timeout=120
        )
        print(done.stdout)  # pytest -rP shows the library's own words
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def header(magic: bytes = b"ftrt", version: tuple[int, ...] = VERSION) -> bytes:
    """Return the known part of a plan's header: a mark, and the version at byte 24."""
    return magic + bytes(20) + bytes(version)


@ON_GPU
@pytest.mark.parametrize(
    "contents",
    [
        pytest.param(b"no plan at all" * 100, id="text"),
        pytest.param(np.random.default_rng(0).bytes(100_000), id="noise"),
        pytest.param(header() + bytes(10_000), id="a header alone"),
        pytest.param(header(magic=b"none") + bytes(10_000), id="another mark"),
        pytest.param(header(version=(8, 6, 1, 6)) + bytes(10_000), id="another version"),
    ],
)
def test_an_invalid_plan_is_an_error_and_the_device_still_works(opened, contents):
    said = opened(contents)
    assert said.count("lean runtime 11.4.0.106 cannot load the plan on ") == 2
    assert "edgellm build" in said
    assert "device works: [0.0, 0.0, 0.0]" in said


@ON_GPU
def test_a_missing_plan_is_an_error_that_says_how_to_make_one(opened):
    said = opened(None)
    assert said.count("no plan for ") == 2
    assert "--version-compatible` where TensorRT and this GPU are" in said
