# SPDX-License-Identifier: Apache-2.0
"""The TensorRT backend with plans of TensorRT for RTX, on the library's double."""

import functools
import gc
import sys

import numpy as np
import onnx
import pytest

from doubles import tensorrt_double, tensorrt_rtx_double
from doubles.deferred_device import DeferredDevice
from edgellm_ros.builder.tensorrt.plan import PlanOptions, build_plan
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.optimization_profile import Profile, Range
from edgellm_ros.engine.tensorrt.backend import TensorRTBackend
from edgellm_ros.engine.tensorrt.plan_choice import choose_plan
from edgellm_ros.engine.tensorrt.plan_file import read_plans
from fixtures.graphs import linear_with_cache
from fixtures.on_device import linear_tensors

pytestmark = pytest.mark.only_on("cpu", reason="these tests bring their own device")
PROFILES = (
    Profile("prefill", {"B": Range(1, 1, 4), "S": Range(2, 4, 8)}, lengths_vary=True),
    Profile("decode", {"B": Range(1, 1, 4), "S": Range(1, 1, 1)}),
)
GPUS = ("sm_86", "sm_89")
KERNELS = "sm_86+sm_89-rtx1.7.1.116.plan.sm_89.kernels"


@pytest.fixture(autouse=True)
def library(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", tensorrt_rtx_double)
    return tensorrt_rtx_double


@pytest.fixture
def host() -> DeferredDevice:
    device = DeferredDevice("tensorrt")
    device.arch, device.description = "sm_89", "NVIDIA RTX 4090 (sm_89)"
    return device


@pytest.fixture
def model(tmp_path, library):
    folder = tmp_path / "engine" / "llm"
    folder.mkdir(parents=True)
    onnx.save(linear_with_cache(), folder / "model.onnx")
    build_plan(folder / "model.onnx", PROFILES, PlanOptions(), library, GPUS)
    return folder / "model.onnx"


@pytest.fixture
def tensors(host):
    return functools.partial(linear_tensors, host)


def test_a_plan_for_several_gpus_runs_on_each(model, host, tensors):
    backend = TensorRTBackend(model, host)
    given = tensors()
    backend.run(backend.bind(0, given, None), None)
    weight = onnx.numpy_helper.to_array(linear_with_cache().graph.initializer[0])
    np.testing.assert_allclose(host.download(given["y"])[0, 0], weight.sum(axis=0), rtol=1e-6)


def test_a_gpu_without_a_plan_is_named_with_the_plan_s_gpus(model, host):
    host.arch, host.description = "sm_120", "NVIDIA RTX 5090 (sm_120)"
    with pytest.raises(
        EngineError,
        match=r"no plan for NVIDIA RTX 5090 \(sm_120\) and TensorRT for RTX 1.7.1.116 \(there: "
        r"sm_86\+sm_89-rtx1.7.1.116.plan \(TensorRT for RTX 1.7.1.116, for sm_86 and sm_89\)\); "
        r"run `edgellm build .*engine` on this machine",
    ):
        TensorRTBackend(model, host)


def test_a_gpu_that_tensorrt_for_rtx_does_not_support_needs_tensorrt(model, host):
    host.arch, host.description = "sm_90", "NVIDIA H200 (sm_90)"
    with pytest.raises(
        EngineError,
        match=r"no plan for NVIDIA H200 \(sm_90\).*runs on sm_75, .* only: `pip install tensorrt-cu13` and",
    ):
        TensorRTBackend(model, host)


def test_another_version_s_plan_is_named_with_its_version(model, host, library, monkeypatch):
    monkeypatch.setattr(library, "__version__", "1.8.0.1")
    with pytest.raises(EngineError, match=r"TensorRT for RTX 1.8.0.1 \(there: .*TensorRT for RTX 1.7.1.116,"):
        TensorRTBackend(model, host)


def test_the_installed_library_that_has_a_plan_is_taken(model, host, library, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", tensorrt_double)
    assert choose_plan(model, host)[0] is library
    build_plan(model, PROFILES, PlanOptions(), tensorrt_double, ["sm_89"])
    assert choose_plan(model, host)[0] is tensorrt_double


def test_kernels_are_compiled_at_once_unless_sequence_lengths_vary(model, host, library, tensors):
    backend = TensorRTBackend(model, host)
    strategies = []
    for profile, tokens in ((0, 3), (1, 1)):
        bound = backend.bind(profile, tensors(2, tokens), None)
        config = backend._contexts[profile][bound]._config
        strategies.append(config.dynamic_shapes_kernel_specialization_strategy.name)
    assert strategies == ["LAZY", "EAGER"]


@pytest.mark.slow
def test_compiled_kernels_are_kept_in_a_file_for_the_next_process(model, host, tensors):
    backend = TensorRTBackend(model, host)
    backend.run(backend.bind(1, tensors(2, 1), None), None)
    host.synchronize()
    assert not model.with_name(KERNELS).exists()
    del backend
    gc.collect()
    kept = model.with_name(KERNELS).read_bytes()
    again = TensorRTBackend(model, host)
    assert bytes(again._kernels._cache.serialize()) == kept
    again.run(again.bind(1, tensors(3, 1), None), None)
    host.synchronize()
    del again
    gc.collect()
    assert len(model.with_name(KERNELS).read_bytes()) > len(kept)


def test_compiled_kernels_are_kept_as_soon_as_a_graph_is_captured(model, host, tensors):
    backend = TensorRTBackend(model, host)
    backend.capture(backend.bind(1, tensors(1, 1), None), None)
    assert model.with_name(KERNELS).stat().st_size > 0


def test_kernels_of_another_library_are_compiled_again(model, host, tensors):
    model.with_name(KERNELS).write_bytes(b"of another version")
    backend = TensorRTBackend(model, host)
    backend.capture(backend.bind(1, tensors(1, 1), None), None)
    assert model.with_name(KERNELS).read_bytes().startswith(b"kernels")


def test_a_folder_that_cannot_be_written_is_only_a_warning(model, host, tensors, monkeypatch, caplog):
    def refuse(path, contents):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("edgellm_ros.engine.tensorrt.rtx.write_atomically", refuse)
    backend = TensorRTBackend(model, host)
    assert backend.capture(backend.bind(1, tensors(1, 1), None), None) is not None
    assert f"{KERNELS}: compiled kernels are not kept: [Errno 13] Permission denied" in caplog.text


def test_kernels_that_the_library_does_not_serialise_are_only_a_warning(
    model, host, tensors, library, monkeypatch, caplog
):
    monkeypatch.setattr(library.IRuntimeCache, "serialize", lambda cache: None)
    backend = TensorRTBackend(model, host)
    assert backend.capture(backend.bind(1, tensors(1, 1), None), None) is not None
    assert f"{KERNELS}: compiled kernels are not kept: the library does not" in caplog.text
    assert not model.with_name(KERNELS).exists()


def test_kernels_are_written_only_if_they_changed(model, host, tensors):
    backend = TensorRTBackend(model, host)
    backend.capture(backend.bind(1, tensors(1, 1), None), None)
    written = model.with_name(KERNELS).stat().st_ino
    backend.capture(backend.bind(1, tensors(1, 1), None), None)
    assert model.with_name(KERNELS).stat().st_ino == written


def test_a_plan_of_another_version_under_this_version_s_record_is_named(model, host):
    (plan,) = read_plans(model)
    contents = plan.path.read_bytes()
    plan.path.write_bytes(contents[:24] + bytes([1, 6, 0, 9]) + contents[28:])
    with pytest.raises(EngineError, match=r"created with TensorRT-RTX version 1.6.0.9.*another TensorRT"):
        TensorRTBackend(model, host)
