# SPDX-License-Identifier: Apache-2.0
"""The TensorRT backend on TensorRT's double, which enforces the library's rules."""

import dataclasses
import functools
import gc
import sys
import weakref
from pathlib import Path

import numpy as np
import onnx
import pytest

from doubles import tensorrt_double
from doubles.deferred_device import DeferredDevice
from edgellm_ros.builder.tensorrt.plan import PlanOptions, build_plan
from edgellm_ros.engine.errors import DeviceLostError, DeviceMemoryError, EngineError
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine.optimization_profile import Profile, Range
from edgellm_ros.engine.tensorrt import context_memory
from edgellm_ros.engine.tensorrt import library as tensorrt_library
from edgellm_ros.engine.tensorrt.backend import KEPT_CONTEXTS, TensorRTBackend
from edgellm_ros.engine.tensorrt.context_memory import ContextMemory
from edgellm_ros.engine.tensorrt.errors import engine_error, plan_error
from edgellm_ros.engine.tensorrt.plan_choice import choose_plan
from edgellm_ros.engine.tensorrt.plan_file import TENSORRT, PlanFile, plan_path, read_plans, write_plan
from fixtures.graphs import FLOAT, helper, linear_with_cache, save_model
from fixtures.on_device import linear_tensors, put

pytestmark = pytest.mark.only_on("cpu", reason="these tests bring their own device")
PREFILL = Profile("prefill", {"B": Range(1, 1, 4), "S": Range(2, 4, 8)}, lengths_vary=True)
DECODE = Profile("decode", {"B": Range(1, 1, 4), "S": Range(1, 1, 1)})


@pytest.fixture(autouse=True)
def library(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", tensorrt_double)
    return tensorrt_double


@pytest.fixture
def host() -> DeferredDevice:
    return DeferredDevice("tensorrt")


@pytest.fixture
def model(tmp_path, library):
    folder = tmp_path / "engine" / "llm"
    folder.mkdir(parents=True)
    onnx.save(linear_with_cache(), folder / "model.onnx")
    build(folder / "model.onnx", library)
    return folder / "model.onnx"


def build(model, library, profiles=(PREFILL, DECODE), **options):
    return build_plan(model, profiles, PlanOptions(**options), library, ["host"]).path


@pytest.fixture
def backend(model, host) -> TensorRTBackend:
    return TensorRTBackend(model, host)


@pytest.fixture
def tensors(host):
    return functools.partial(linear_tensors, host)


class TestRunning:
    def test_a_run_is_queued_until_the_caller_waits(self, host, backend, tensors):
        given = tensors()
        bound = backend.bind(0, given, None)
        backend.run(bound, None)
        host.upload(given["x"], np.full((2, 3, 4), 7, np.float32))  # behind the run
        weight = onnx.numpy_helper.to_array(linear_with_cache().graph.initializer[0])
        np.testing.assert_allclose(host.download(given["y"])[0, 0], weight.sum(axis=0), rtol=1e-6)
        assert host.download(given["cache"])[1, 0, :, 0].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]

    def test_alternating_profiles_keep_their_bindings(self, host, backend, tensors):
        long, short = tensors(2, 3), tensors(2, 1)
        first, second = backend.bind(0, long, None), backend.bind(1, short, None)
        for bound in (first, second, first, second):
            backend.run(bound, None)
        host.synchronize()

    def test_more_bindings_than_contexts_can_alternate(self, host, backend, tensors):
        given = [tensors(2, 2) for _ in range(KEPT_CONTEXTS + 2)]
        bound = [backend.bind(0, each, None) for each in given]
        for i, each in enumerate(given):
            host.upload(each["x"], np.full((2, 2, 4), i, np.float32))
        for each in bound:
            backend.run(each, None)
        results = [host.download(each["y"])[0, 0, 0] for each in given]
        np.testing.assert_allclose(results, np.arange(len(given)) * results[1], rtol=1e-6)

    def test_unaligned_tensors_use_aligned_copies(self, host, backend, tensors):
        given = tensors(2, 1)
        x, y = put(host, np.ones((3, 1, 4)), np.float32), host.zeros((3, 1, 3), np.float32)
        given |= {"x": x.rows(1, 3), "y": y.rows(1, 3)}
        assert given["x"].pointer % 256 == 16
        bound = backend.bind(1, given, None)
        backend.run(bound, None)
        assert (host.download(y) != 0).all(axis=(1, 2)).tolist() == [False, True, True]
        host.upload(x, np.zeros((3, 1, 4), np.float32))
        backend.run(bound, None)
        assert not host.download(y).any()


class TestGraphs:
    def test_a_captured_run_is_replayed_with_new_contents(self, host, backend, tensors):
        executor = EngineExecutor(backend, "llm")
        given = tensors(1, 1)
        executor.prepare(1, {"B": 1, "S": 1}, given)
        assert executor.capture_graph(host.stream)
        first = host.download(given["y"])
        host.upload(given["x"], np.full((1, 1, 4), 2, np.float32))
        executor.execute(host.stream)
        np.testing.assert_allclose(host.download(given["y"]), 2 * first, rtol=1e-6)

    def test_a_recorded_context_is_not_used_for_other_runs(self, host, backend, tensors):
        graphs = []
        for batch in (1, 2, 3, 4):
            bound = backend.bind(1, tensors(batch, 1), None)
            graphs.append(backend.capture(bound, None))
            backend.run(bound, None)
        for graph in graphs:
            graph.launch(None)
        host.synchronize()

    def test_a_binding_runs_several_times_in_one_graph(self, host, backend, tensors):
        given = [tensors(batch, 1) for batch in (1, 2)]
        bound = [backend.bind(1, each, None) for each in given]
        order = [bound[0], bound[1], bound[1], bound[0]]
        for each in order:
            backend.run(each, None)
        graph = host.capture(lambda: [backend.run(each, None) for each in order])
        assert [len(each.recorded) for each in bound] == [1, 1]
        expected = [host.download(each["y"]) for each in given]
        for each in given:
            host.fill_zero(each["y"])
        graph.launch(None)
        for each, y in zip(given, expected, strict=True):
            np.testing.assert_array_equal(host.download(each["y"]), y)

    @pytest.mark.slow
    def test_a_recorded_context_is_freed_with_its_binding(self, host, backend, tensors):
        bound = backend.bind(1, tensors(1, 1), None)
        graph = backend.capture(bound, None)
        (context,) = map(weakref.ref, bound.recorded)
        gc.collect()
        assert context() is not None
        del bound, graph
        gc.collect()
        assert context() is None

    def test_a_change_of_shapes_during_recording_is_an_error(self, host, backend, tensors):
        first = tensors(2, 1)
        backend.run(backend.bind(1, first, None), None)
        second = backend.bind(1, tensors(3, 1), None)
        with pytest.raises(EngineError, match=r"shapes changed since the last enqueue"):
            host.capture(lambda: backend.run(second, None))


class TestBindingErrors:
    def test_a_shape_outside_the_profile_names_binding_value_and_range(self, backend, tensors):
        with pytest.raises(
            EngineError, match=r"x \[2, 1, 4\] is outside profile 0, from \[1, 2, 4\] to \[4, 8, 4\]"
        ):
            backend.bind(0, tensors(2, 1), None)
        with pytest.raises(EngineError, match=r"no optimization profile 2, the plan has 2"):
            backend.bind(2, tensors(2, 1), None)

    def test_a_cache_that_is_not_updated_in_place_is_named(self, host, backend, tensors):
        given = tensors()
        given["present"] = host.zeros((2, 1, 8, 4), np.float32)
        with pytest.raises(EngineError, match=r"present is written in the memory of cache"):
            backend.bind(0, given, None)

    def test_an_unaligned_cache_is_named(self, host, backend, tensors):
        given = tensors(1)
        cache = host.zeros((65, 4), np.float32)
        given["cache"] = given["present"] = cache.rows(1, 65).view(1, 1, 8, 4)
        with pytest.raises(EngineError, match=r"cache at .* must be at a multiple of 256 bytes"):
            backend.bind(0, given, None)

    def test_an_output_over_an_input_is_an_error_if_the_plan_has_no_such_update(
        self, host, tmp_path, library
    ):
        path = save_model(
            tmp_path / "model.onnx",
            [helper.make_node("Neg", ["x"], ["y"])],
            {"x": (FLOAT, ["B"])},
            {"y": (FLOAT, ["B"])},
        )
        build(path, library, [Profile("any", {"B": Range(1, 1, 4)})])
        x = host.zeros((2,), np.float32)
        with pytest.raises(EngineError, match=r"y is not updated in place, but has the address of x"):
            TensorRTBackend(path, host).bind(0, {"x": x, "y": x}, None)


class TestProfileShapes:
    def test_smallest_tuned_and_largest_shape_of_each_profile(self, backend):
        executor = EngineExecutor(backend, "llm")
        found = [
            [executor.get_profile_shape("x", profile, selector) for selector in ("min", "opt", "max")]
            for profile in (0, 1)
        ]
        assert found[0] == [(1, 2, 4), (1, 4, 4), (4, 8, 4)]
        assert found[1] == [(1, 1, 4), (1, 1, 4), (4, 1, 4)]
        assert executor.get_profile_shape("cache", 0, "max") == (4, 1, 8, 4)

    def test_an_unknown_profile_is_named(self, backend):
        with pytest.raises(EngineError, match=r"no optimization profile 2, the plan has 2"):
            EngineExecutor(backend, "llm").get_profile_shape("x", 2, "opt")


class TestGivenContextMemory:
    def test_the_required_size_is_the_engine_s(self, backend):
        engine = backend._engine
        executor = EngineExecutor(backend, "llm")
        assert executor.required_context_memory_size == engine.device_memory_size_v2 > 0

    def test_runs_use_the_given_memory_and_no_other(self, model, host, tensors):
        executor = EngineExecutor(TensorRTBackend(model, host), "llm")
        memory = host.zeros((executor.required_context_memory_size,), np.uint8)
        executor.set_context_memory(memory)
        executor.prepare(0, {"B": 2, "S": 3}, tensors())
        executor.execute()
        assert host.download(memory).all()  # the double fills it with junk
        assert not ContextMemory.of(host)._buffers

    def test_a_binding_made_before_runs_in_memory_given_later(self, host, backend, tensors):
        executor = EngineExecutor(backend, "llm")
        given = tensors()
        executor.prepare(0, {"B": 2, "S": 3}, given)
        executor.execute()
        expected = host.download(given["y"])
        memory = host.zeros((executor.required_context_memory_size,), np.uint8)
        executor.set_context_memory(memory)
        host.fill_zero(given["y"])
        executor.execute()
        np.testing.assert_array_equal(host.download(given["y"]), expected)
        assert host.download(memory).all()

    def test_a_captured_graph_keeps_its_memory(self, host, backend, tensors):
        executor = EngineExecutor(backend, "llm")
        given = tensors(1, 1)
        executor.prepare(1, {"B": 1, "S": 1}, given)
        executor.capture_graph()
        memory = host.zeros((executor.required_context_memory_size,), np.uint8)
        executor.set_context_memory(memory)
        executor.execute()
        assert host.download(given["y"]).all()
        assert not host.download(memory).any()

    def test_memory_that_does_not_fit_is_refused(self, host, backend):
        executor = EngineExecutor(backend, "llm")
        size = executor.required_context_memory_size
        with pytest.raises(EngineError, match=rf"must have {size} bytes, got {size - 1}"):
            executor.set_context_memory(host.empty((size - 1,), np.uint8))
        with pytest.raises(EngineError, match=r"must be at a multiple of 256 bytes"):
            executor.set_context_memory(host.empty((size + 8,), np.uint8).rows(8, size + 8))


class TestContextMemory:
    def test_engines_of_a_device_share_one_buffer_of_the_largest_size(self, model, host, tensors):
        first, second = TensorRTBackend(model, host), TensorRTBackend(model, host)
        ContextMemory.of(host).reserve(10_000)
        first.bind(0, tensors(), None)
        window = ContextMemory.of(host).window()
        second.bind(0, tensors(), None)
        assert ContextMemory.of(host).window() == window
        assert (window[0] % 256, window[1]) == (0, 10_000)

    def test_devices_share_no_buffer_and_the_last_engine_frees_it(self, model, host):
        backend, other = TensorRTBackend(model, host), DeferredDevice("tensorrt")
        assert ContextMemory.of(other) is not ContextMemory.of(host)
        ContextMemory.of(host).window()
        del backend
        gc.collect()
        assert id(host) not in context_memory._memory_of_device

    def test_too_little_context_memory_is_a_device_memory_error(self, model, host, tensors, monkeypatch):
        backend, given = TensorRTBackend(model, host), tensors()

        def full(shape, dtype):
            raise DeviceMemoryError("out of GPU memory: 5 bytes wanted")

        monkeypatch.setattr(host, "empty", full)
        with pytest.raises(DeviceMemoryError, match=r"5 bytes wanted"):
            backend.bind(0, given, None)


def record(model, **changes) -> PlanFile:
    """Write a plan whose record differs from the built plan's; contents: of the plan."""
    (plan,) = read_plans(model)
    contents = changes.pop("contents", plan.path.read_bytes())
    plan = dataclasses.replace(plan, bytes=len(contents), **changes)
    path = plan_path(model, plan.gpus, plan.library, plan.version, plan.version_compatible)
    plan = dataclasses.replace(plan, path=path)
    write_plan(plan, memoryview(contents))
    return plan


def only(model, **changes) -> PlanFile:
    """Replace the built plan by one with another record."""
    (built,) = read_plans(model)
    plan = record(model, **changes)
    if plan.path != built.path:
        built.path.unlink()
    return plan


class TestPlans:
    def test_a_missing_plan_names_the_gpu_the_plans_that_exist_and_the_command(self, model, host):
        only(model, gpus=("sm_87",), version="10.15.0.1")
        with pytest.raises(
            EngineError,
            match=r"llm: no plan for Test double \(host\) and TensorRT 11.4.0.106 .*"
            r"\(there: sm_87-trt10.15.0.1.plan \(TensorRT 10.15.0.1, for sm_87\)\); ",
        ) as e:
            TensorRTBackend(model, host)
        assert f"edgellm build {model.parent.parent}` on this machine" in str(e.value)

    def test_a_truncated_plan_is_named_with_its_sizes(self, model, host):
        (plan,) = read_plans(model)
        plan.path.write_bytes(plan.path.read_bytes()[:-1])
        with pytest.raises(
            EngineError,
            match=rf"host-trt11.4.0.106.plan has {plan.bytes - 1} bytes, {plan.bytes} were built: truncated",
        ):
            TensorRTBackend(model, host)

    def test_a_plan_of_another_export_is_named(self, model, host):
        graph = onnx.load(model)
        graph.metadata_props.add(key="weights_sha256", value="of other weights")
        onnx.save(graph, model)
        with pytest.raises(EngineError, match=r"host-trt.*plan: built from another export than .*model.onnx"):
            TensorRTBackend(model, host)

    @pytest.mark.parametrize(
        "damaged",
        ["", "{}", "[]", '{"profiles": [{"name": "a"}]}', '{"gpus": ["host"], "profiles": [], "version": 1}'],
    )
    def test_a_damaged_record_is_named(self, model, host, damaged):
        path = model.with_name("host-trt11.4.0.106.plan.json")
        path.write_text(damaged)
        with pytest.raises(EngineError, match=rf"{path}: damaged .*edgellm build"):
            TensorRTBackend(model, host)

    @pytest.mark.parametrize(
        ("change", "meaning"),
        [
            (lambda plan: b"junk" + plan[4:], "header.magicTag.*no plan of this library, or damaged"),
            (lambda plan: plan[:24] + bytes([11, 2, 0, 9]) + plan[28:], "another TensorRT made the plan"),
            (
                lambda plan: plan.replace(b'"arch": "host"', b'"arch": "sm87"'),
                "made for another GPU or platform: the plan is for host",
            ),
        ],
    )
    def test_a_plan_that_cannot_be_loaded_says_why(self, model, host, change, meaning):
        (plan,) = read_plans(model)
        record(model, contents=change(plan.path.read_bytes()))
        with pytest.raises(
            EngineError,
            match=rf"TensorRT 11.4.0.106 cannot load the plan on Test double.*{meaning}.*edgellm build",
        ):
            TensorRTBackend(model, host)

    PLAN = PlanFile(
        path=Path("engine/llm/a.plan"),
        library=TENSORRT,
        version="11.4.0.106",
        gpus=("sm_87", "sm_110"),
        version_compatible=False,
        bytes=9,
        graph_sha256="",
        profiles=(),
    )

    # Texts of libnvinfer_lean.so 11.4.0.106, in its forms "%s: Error Code %d: %s (%s)" and
    # "[%s::%s::%d] Error Code %d: %s (%s)".
    @pytest.mark.parametrize(
        "reason",
        [
            "IRuntime::deserializeCudaEngine: Error Code 1: Cuda Runtime (CUDA driver version is "
            "insufficient for CUDA runtime version)",
            "[cudaDriverHelpers.cpp::deserializeCudaEngineEx::31] Error Code 1: Cuda Driver (Failed to query "
            "CUDA driver version. Please check Nvidia GPU driver installation.)",
            "IRuntime::deserializeCudaEngine: Error Code 6: Internal Error (CUDA initialization failure with "
            "error: 999); IRuntime::deserializeCudaEngine: Error Code 2: Internal Error (Engine "
            "deserialization failed.)",
        ],
    )
    def test_a_gpu_error_is_not_reported_as_a_damaged_plan(self, reason):
        error = str(plan_error(self.PLAN, "TensorRT 11.4.0.106", "NVIDIA Thor (sm_110)", reason))
        assert reason in error
        assert "the GPU or its driver is the reason, not the plan" in error
        assert "damaged" not in error
        assert "edgellm build" not in error

    @pytest.mark.parametrize(
        ("reason", "meaning"),
        [
            (
                "Error Code 1: Serialization (Serialization assertion plan.header.size == blobSize failed.)",
                "damaged",
            ),
            ("Error Code 4: API Usage Error (Cannot deserialize empty blob.)", "damaged"),
            ("Error Code 4: API Usage Error (Not a valid plan stream.)", "damaged"),
            ("Error Code 2: Internal Error (No engine found in plan.)", "damaged"),
            (
                "Error Code 6: API Usage Error (TensorRT plan major version does not match runtime major "
                "version. )",
                "another TensorRT made the plan",
            ),
            (
                "Error Code 6: API Usage Error (Trying to load an engine created with incompatible "
                "serialization version (1). Check that the engine was not created using safety runtime, same "
                "OS was used and version compatibility parameters were set accordingly and that it is a TRT "
                "engine file.)",
                "another TensorRT made the plan",
            ),
            (
                "Error Code 6: API Usage Error (The engine plan file is generated on an incompatible device, "
                "expecting compute 8.7 got compute 9.0, please rebuild.)",
                "another GPU or platform",
            ),
            (
                "Error Code 1: Serialization (Platform specific tag mismatch detected. TensorRT plan files "
                "are only supported on the target runtime platform they were created on.)",
                "another GPU or platform",
            ),
            ("Error Code 2: Internal Error (Engine deserialization failed.)", ""),
            ("Error Code 2: Internal Error (Assertion mMyelinResource != nullptr failed. )", ""),
        ],
    )
    def test_an_error_is_classified_by_its_reason_not_by_function_names(self, reason, meaning):
        reason = f"IRuntime::deserializeCudaEngine: {reason}"
        error = str(plan_error(self.PLAN, "TensorRT 11.4.0.106", "NVIDIA Thor (sm_110)", reason))
        assert f"cannot load the plan on NVIDIA Thor (sm_110): {reason} (" in error
        explained = error.rpartition(" (")[2]
        assert meaning in explained
        assert bool(meaning) == (":" in explained)
        assert "the plan is for sm_87 and sm_110; `edgellm build engine` makes one" in explained

    def test_a_plan_of_another_graph_is_named(self, model, host, library, tmp_path):
        other = tmp_path / "other" / "model.onnx"
        other.parent.mkdir()
        onnx.save(linear_with_cache(capacity=16), other)
        contents = build(other, library).read_bytes()
        record(model, contents=contents)
        with pytest.raises(EngineError, match=r"made from another graph than model.onnx \(cache, present\)"):
            TensorRTBackend(model, host)

    def test_a_record_with_other_profiles_than_the_plan_is_named(self, model, host):
        record(model, profiles=(PREFILL,))
        with pytest.raises(EngineError, match=r"made from another graph .*\(optimization profiles\)"):
            TensorRTBackend(model, host)

    def test_the_latest_version_compatible_plan_that_is_not_newer_is_taken(self, model, host, library):
        for version in ("11.2.0.9", "11.10.0.1", "10.16.0.3", library.__version__):
            first = model.with_name("host-trt11.4.0.106.plan")
            plan = dataclasses.replace(
                next(plan for plan in read_plans(model) if plan.path == first),
                version=version,
                version_compatible=True,
            )
            path = plan_path(model, plan.gpus, TENSORRT, version, True)
            write_plan(dataclasses.replace(plan, path=path), memoryview(first.read_bytes()))
        host.allow_plan_code, taken = True, []
        for _ in range(3):
            _, plan = choose_plan(model, host)
            taken.append(plan.path.name)
            plan.path.unlink()
        assert taken == [
            "host-trt11.4.0.106.plan",
            "host-trt11.4.0.106-compatible.plan",
            "host-trt11.2.0.9-compatible.plan",
        ]

    def test_the_lean_library_takes_version_compatible_plans_only(self, model, host, library, monkeypatch):
        monkeypatch.setattr(library, "__name__", tensorrt_library.LEAN)
        monkeypatch.setitem(sys.modules, "tensorrt", None)
        monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
        monkeypatch.setitem(sys.modules, tensorrt_library.LEAN, library)
        with pytest.raises(
            EngineError, match=r"no plan for .* and TensorRT's lean runtime .* --version-compatible` where"
        ):
            choose_plan(model, host)
        compatible, host.allow_plan_code = only(model, version_compatible=True), True
        assert choose_plan(model, host) == (library, compatible)


class TestCodeOfPlans:
    """A version-compatible plan contains a runtime of its own.

    That runtime runs in the process that loads the plan.
    """

    def test_a_plan_with_code_is_refused_unless_the_user_allows_it(self, model, host):
        compatible = only(model, version_compatible=True)
        with pytest.raises(
            EngineError,
            match=rf"{compatible.path}: a version-compatible plan contains code, .* --allow-plan-code "
            r"\(node: parameter allow_plan_code\)",
        ):
            TensorRTBackend(model, host)

    def test_a_plan_with_code_is_loaded_if_the_user_allows_it(self, model, host, library, tensors):
        (plain,) = read_plans(model)
        plain.path.unlink()
        build(model, library, version_compatible=True)
        host.allow_plan_code = True
        backend, given = TensorRTBackend(model, host), tensors()
        backend.run(backend.bind(0, given, None), None)
        assert backend.path.name == "host-trt11.4.0.106-compatible.plan"

    def test_a_plan_without_code_is_taken_where_code_is_not_allowed(self, model, host):
        (plain,) = read_plans(model)
        record(model, version_compatible=True)
        assert choose_plan(model, host)[1] == plain

    def test_a_record_that_hides_the_code_of_a_plan_does_not_allow_it(self, model, host, library):
        (plain,) = read_plans(model)
        with_code = build(model, library, version_compatible=True)
        contents = with_code.read_bytes()
        with_code.unlink()
        write_plan(dataclasses.replace(plain, bytes=len(contents)), memoryview(contents))
        with pytest.raises(EngineError, match="the plan contains code, which the user has not allowed"):
            TensorRTBackend(model, host)

    @pytest.mark.parametrize("allowed", [False, True])
    def test_the_library_is_told_the_users_choice(self, model, host, library, monkeypatch, allowed):
        told = []

        class Runtime(library.Runtime):
            def deserialize_cuda_engine(self, plan):
                told.append(self.engine_host_code_allowed)
                return super().deserialize_cuda_engine(plan)

        monkeypatch.setattr(library, "Runtime", Runtime)
        host.allow_plan_code = allowed
        TensorRTBackend(model, host)
        assert told == [allowed]


class TestLibrary:
    def test_without_any_library_the_error_says_what_to_install(self, model, host, monkeypatch):
        for name in tensorrt_library.LIBRARIES:
            monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(EngineError) as e:
            choose_plan(model, host)
        assert "TensorRT is not installed" in str(e.value)
        for package in ("tensorrt-cu13", "tensorrt_rtx_cu13", "tensorrt-lean-cu13"):
            assert f"pip install {package}" in str(e.value)

    def test_a_library_that_is_too_old_says_so(self, library, monkeypatch):
        monkeypatch.setattr(library, "__version__", "10.3.0")
        with pytest.raises(EngineError, match=r"TensorRT 10.3.0 is too old, 10.15 or later"):
            tensorrt_library.load_library("tensorrt")

    @pytest.mark.parametrize(
        ("version", "machine"), [((3, 15), "x86_64"), ((3, 8), "x86_64"), ((3, 12), "aarch64")]
    )
    def test_where_tensorrt_for_rtx_cannot_be_installed_the_error_says_so(
        self, monkeypatch, version, machine
    ):
        monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
        monkeypatch.setattr(tensorrt_library.sys, "version_info", (*version, 0))
        monkeypatch.setattr(tensorrt_library.platform, "machine", lambda: machine)
        here = ".".join(map(str, version))
        with pytest.raises(
            EngineError, match=rf"for x86-64 and Python 3.9 to 3.14, this is Python {here} on {machine}"
        ):
            tensorrt_library.load_library("tensorrt_rtx")

    @pytest.mark.parametrize(
        ("text", "kind"),
        [
            ("Error Code 2: OutOfMemory (Requested size was 5 bytes.)", DeviceMemoryError),
            ("Error Code 1: Cuda Runtime (an illegal memory access was encountered)", DeviceLostError),
            ("Error Code 3: API Usage Error", EngineError),
        ],
    )
    def test_error_classes_follow_tensorrt_s_messages(self, text, kind):
        assert type(engine_error(text)) is kind
