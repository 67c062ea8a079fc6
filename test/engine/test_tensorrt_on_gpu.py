# SPDX-License-Identifier: Apache-2.0
"""A plan of TensorRT for RTX on the GPU at hand: it runs, or it is refused.

The error says for which GPUs the plan is.
"""

from __future__ import annotations

import dataclasses
import shutil

import numpy as np
import onnx
import pytest

from edgellm_ros.builder.tensorrt.plan import PlanOptions, build_plan
from edgellm_ros.engine.device import CpuDevice, Device, open_device
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine.optimization_profile import Profile, Range
from edgellm_ros.engine.tensorrt.backend import TensorRTBackend
from edgellm_ros.engine.tensorrt.library import load_library
from edgellm_ros.engine.tensorrt.plan_file import plan_path, read_plans, write_plan
from edgellm_ros.engine.tensorrt.rtx import supported_gpus
from fixtures.graphs import linear_with_cache
from fixtures.on_device import put

PROFILES = (
    Profile("prefill", {"B": Range(1, 1, 4), "S": Range(2, 4, 8)}, lengths_vary=True),
    Profile("decode", {"B": Range(1, 1, 4), "S": Range(1, 1, 1)}),
)


@pytest.fixture(scope="module")
def rtx():
    return pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx_cu13 has no wheel here")


@pytest.fixture(scope="module")
def gpu() -> Device:
    try:
        return open_device("tensorrt")
    except EngineError as error:
        pytest.skip(f"needs an NVIDIA GPU: {error}")


@pytest.fixture(scope="module")
def supported(rtx, gpu) -> None:
    if gpu.arch not in supported_gpus(rtx):
        pytest.skip(f"TensorRT for RTX does not support {gpu.description}")


@pytest.fixture(scope="module")
def unsupported(rtx, gpu) -> None:
    if gpu.arch in supported_gpus(rtx):
        pytest.skip(f"TensorRT for RTX supports {gpu.description}")


@pytest.fixture(scope="module")
def built(rtx, tmp_path_factory):
    """An engine directory with a plan for all GPUs that can be named together."""
    model = tmp_path_factory.mktemp("engine") / "llm" / "model.onnx"
    model.parent.mkdir()
    onnx.save(linear_with_cache(), model)
    gpus = [name for name in supported_gpus(rtx) if name != "sm_75"]  # which has no fp32 products
    build_plan(model, PROFILES, PlanOptions(), load_library("tensorrt_rtx"), gpus)
    return model


@pytest.fixture
def model(built, tmp_path):
    return shutil.copytree(built.parent, tmp_path / "llm") / "model.onnx"


def inputs(batch: int, tokens: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(batch)
    return {
        "x": rng.standard_normal((batch, tokens, 4)).astype(np.float32),
        "write_index": np.arange(batch),
        "cache": rng.standard_normal((batch, 1, 8, 4)).astype(np.float32),
    }


def results(device: Device, executor: EngineExecutor, profile: int, batch: int, tokens: int, graph: bool):
    given = {name: put(device, array) for name, array in inputs(batch, tokens).items()}
    given |= {"y": device.zeros((batch, tokens, 3), np.float32), "present": given["cache"]}
    executor.prepare(profile, {"B": batch, "S": tokens}, given)
    if graph:
        executor.capture_graph()
    executor.execute()
    return device.download(given["y"]), device.download(given["cache"])


@pytest.mark.usefixtures("supported")
@pytest.mark.parametrize("graph", [False, True], ids=["run", "graph"])
@pytest.mark.parametrize("profile, batch, tokens", [(0, 2, 3), (1, 3, 1)])
def test_a_plan_gives_onnx_runtime_s_results(gpu, model, profile, batch, tokens, graph):
    host = CpuDevice()
    expected = results(host, EngineExecutor.open(model, host), profile, batch, tokens, False)
    found = results(gpu, EngineExecutor.open(model, gpu), profile, batch, tokens, graph)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("unsupported")
def test_a_gpu_without_support_is_an_error_that_names_it_and_the_plan_s_gpus(gpu, model):
    (plan,) = read_plans(model)
    for _ in range(2):
        with pytest.raises(EngineError) as e:
            TensorRTBackend(model, gpu)
        assert f"no plan for {gpu.description} and " in str(e.value)
        assert str(plan) in str(e.value)
    assert gpu.download(gpu.zeros((3,), "float32")).tolist() == [0, 0, 0]


@pytest.mark.usefixtures("unsupported")
def test_the_library_s_own_refusal_names_the_gpu_and_the_plan_s_gpus(gpu, model):
    """The record claims the GPU at hand, so the library itself must refuse the plan."""
    (plan,) = read_plans(model)
    contents, gpus = plan.path.read_bytes(), (gpu.arch, *plan.gpus)
    plan.path.unlink()
    path = plan_path(model, gpus, plan.library, plan.version)
    write_plan(dataclasses.replace(plan, gpus=gpus, path=path), memoryview(contents))
    for _ in range(2):
        with pytest.raises(EngineError) as e:
            TensorRTBackend(model, gpu)
        print(e.value)  # pytest -rP shows the library's own words
        assert f"cannot load the plan on {gpu.description}: " in str(e.value)
        assert "compute capability" in str(e.value)
        assert "another GPU or platform: the plan is for " in str(e.value)
    assert gpu.download(gpu.zeros((3,), "float32")).tolist() == [0, 0, 0]


@pytest.mark.usefixtures("unsupported")
@pytest.mark.parametrize("change", ["text", "half", "version"])
def test_a_damaged_plan_is_an_error_with_the_library_s_words(gpu, model, change):
    (plan,) = read_plans(model)
    contents = plan.path.read_bytes()
    damaged = {
        "text": b"no plan at all" * 100,
        "half": contents[: len(contents) // 2],
        "version": contents[:24] + bytes([1, 5, 0, 114]) + contents[28:],
    }[change]
    path = plan_path(model, [gpu.arch], plan.library, plan.version)
    claimed = dataclasses.replace(plan, gpus=(gpu.arch,), path=path, bytes=len(damaged))
    write_plan(claimed, memoryview(damaged))
    with pytest.raises(EngineError, match=r"cannot load the plan on .*edgellm build") as e:
        TensorRTBackend(model, gpu)
    print(e.value)
    assert gpu.download(gpu.zeros((3,), "float32")).tolist() == [0, 0, 0]
