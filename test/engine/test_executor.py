# SPDX-License-Identifier: Apache-2.0
import time

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from edgellm_ros.engine.backend import Binding
from edgellm_ros.engine.errors import DeviceLostError, EngineError
from edgellm_ros.engine.executor import KEPT_BINDINGS, EngineExecutor
from edgellm_ros.engine.tensor import Tensor
from fixtures.graphs import FLOAT, INT64, helper, linear_with_cache, save_model
from fixtures.on_device import put

DIMS = {"B": 2, "S": 3}


@pytest.fixture
def executor(device, tmp_path) -> EngineExecutor:
    onnx.save(linear_with_cache(), tmp_path / "model.onnx")
    return EngineExecutor.open(tmp_path / "model.onnx", device)


@pytest.fixture
def tensors(device) -> dict:
    rng = np.random.default_rng(1)
    tensors = {
        "x": put(device, rng.standard_normal((2, 3, 4)), np.float32),
        "write_index": put(device, [2, 5]),
        "cache": put(device, rng.standard_normal((2, 1, 8, 4)), np.float32),
        "y": device.zeros((2, 3, 3), np.float32),
    }
    return {**tensors, "present": tensors["cache"]}


def test_an_engine_equals_the_onnx_reference_and_updates_the_cache_in_place(device, executor, tensors):
    feeds = {name: device.download(tensors[name]) for name in ("x", "write_index", "cache")}
    y, present = ReferenceEvaluator(linear_with_cache()).run(["y", "present"], feeds)
    executor.prepare(0, DIMS, tensors)
    executor.execute()
    np.testing.assert_allclose(device.download(tensors["y"]), y, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(device.download(tensors["cache"]), present)


def test_bindings_are_the_engines_inputs_and_outputs(executor):
    assert executor.bindings["x"] == Binding("x", np.dtype(np.float32), ("B", "S", 4), True)
    assert not executor.bindings["present"].is_input
    assert executor.dtype("write_index") == np.int64
    with pytest.raises(EngineError, match="no binding 'z', only x, write_index, cache, y, present"):
        executor.dtype("z")


def test_a_second_run_sees_new_contents_of_the_same_buffers(device, executor, tensors):
    executor.prepare(0, DIMS, tensors)
    executor.execute()
    first = device.download(tensors["y"])
    device.upload(tensors["x"], 2 * device.download(tensors["x"]))
    executor.prepare(0, DIMS, tensors)
    executor.execute()
    np.testing.assert_allclose(device.download(tensors["y"]), 2 * first, rtol=1e-6)


def test_a_missing_tensor_is_named(executor, tensors):
    del tensors["present"]
    with pytest.raises(EngineError, match="'present' is not bound"):
        executor.prepare(0, DIMS, tensors)


def test_a_superfluous_tensor_is_named_also_after_a_good_prepare(executor, tensors):
    executor.prepare(0, DIMS, tensors)
    with pytest.raises(EngineError, match="unknown binding 'z'"):
        executor.prepare(0, DIMS, {**tensors, "z": tensors["x"]})


def test_a_wrong_type_is_named(device, executor, tensors):
    tensors["write_index"] = device.zeros((2,), np.int32)
    with pytest.raises(EngineError, match="write_index must be int64, got int32"):
        executor.prepare(0, DIMS, tensors)


def test_a_wrong_type_is_named_where_another_tensor_was_bound_before(device, executor, tensors):
    executor.prepare(0, DIMS, tensors)
    good = tensors["x"]
    wrong = Tensor(good.pointer, good.shape, np.dtype(np.int32), good.owner)
    with pytest.raises(EngineError, match="x must be float32, got int32"):
        executor.prepare(0, DIMS, {**tensors, "x": wrong})
    with pytest.raises(EngineError, match="without a successful prepare"):
        executor.execute()
    executor.prepare(0, DIMS, tensors)  # kept
    executor.execute()


def test_a_wrong_shape_is_named_with_its_symbols(executor, tensors):
    tensors["x"] = tensors["x"].view(2, 2, 4)
    with pytest.raises(EngineError, match=r"x \[B, S, 4\] must be \[2, 3, 4\], got \[2, 2, 4\]"):
        executor.prepare(0, DIMS, tensors)


def test_a_dimension_without_a_value_is_named(executor, tensors):
    with pytest.raises(EngineError, match="no value for dimension 'S' of x"):
        executor.prepare(0, {"B": 2}, tensors)


def test_nothing_is_executed_without_a_successful_prepare(executor, tensors):
    with pytest.raises(EngineError, match="without a successful prepare"):
        executor.execute()
    executor.prepare(0, DIMS, tensors)
    with pytest.raises(EngineError, match="is not bound"):
        executor.prepare(0, DIMS, {})
    with pytest.raises(EngineError, match="without a successful prepare"):
        executor.execute()


@pytest.mark.only_on("cpu", reason="GPUs have graphs")
def test_capture_on_the_cpu_runs_nothing(executor, tensors, device):
    executor.prepare(0, DIMS, tensors)
    output = next(name for name, binding in executor.bindings.items() if not binding.is_input)
    device.fill_zero(tensors[output])
    assert executor.capture_graph() is False
    assert not device.download(tensors[output]).any()
    executor.execute()
    assert device.download(tensors[output]).any()


@pytest.mark.only_on("cpu", reason="kernels of a GPU write beside the cache instead of failing")
def test_an_engine_that_fails_names_its_file(device, executor, tensors):
    device.upload(tensors["write_index"], np.array([2, 7]))  # 7 + 3 rows do not fit into 8
    executor.prepare(0, DIMS, tensors)
    with pytest.raises(EngineError, match=r"model\.onnx"):
        executor.execute()


class RecordingBackend:
    """A backend that counts bindings, runs, captures and launches."""

    supports_empty_tensors = True

    def __init__(self) -> None:
        self.bindings = (Binding("x", np.dtype(np.float32), ("B",), True),)
        self.calls: list[str] = []

    def bind(self, profile, tensors, stream):
        self.calls.append("bind")
        return tensors["x"].shape

    def run(self, bound, stream):
        self.calls.append(f"run {bound}")

    def capture(self, bound, stream):
        self.calls.append("capture")
        return self

    def launch(self, stream):
        self.calls.append("launch")


def test_a_current_binding_is_not_bound_again(device):
    backend = RecordingBackend()
    executor = EngineExecutor(backend, "recording")
    buffer = device.empty((4,), np.float32)
    executor.prepare(0, {"B": 4}, {"x": buffer})
    executor.prepare(0, {"B": 4}, {"x": buffer.view(4)})
    assert backend.calls == ["bind"]
    executor.prepare(1, {"B": 4}, {"x": buffer})  # another profile
    executor.prepare(1, {"B": 2}, {"x": buffer.view(2)})  # another shape
    executor.prepare(1, {"B": 2}, {"x": buffer.rows(2, 4)})  # another address
    assert backend.calls == ["bind"] * 4


def test_a_captured_graph_is_replayed_for_the_bindings_it_was_captured_with(device):
    backend = RecordingBackend()
    executor = EngineExecutor(backend, "recording")
    buffer = device.empty((4,), np.float32)
    executor.prepare(0, {"B": 4}, {"x": buffer})
    assert executor.capture_graph() is True
    executor.execute()
    executor.prepare(0, {"B": 2}, {"x": buffer.view(2)})
    executor.execute()
    executor.prepare(0, {"B": 4}, {"x": buffer})
    executor.execute()
    assert backend.calls == ["bind", "capture", "launch", "bind", "run (2,)", "launch"]


def test_alternating_bindings_are_kept_and_the_oldest_is_dropped(device):
    backend = RecordingBackend()
    executor = EngineExecutor(backend, "recording")
    buffer = device.empty((100,), np.float32)

    def step(size):
        executor.prepare(0, {"B": size}, {"x": buffer.view(size)})
        executor.execute()

    for size in (1, 2, 1, 2):
        step(size)
    assert backend.calls == ["bind", "run (1,)", "bind", "run (2,)", "run (1,)", "run (2,)"]
    for size in range(2, KEPT_BINDINGS + 2):
        step(size)
    backend.calls.clear()
    step(2)
    step(1)
    assert backend.calls == ["run (2,)", "bind", "run (1,)"]


def test_a_captured_graph_lives_as_long_as_the_executor(device):
    backend = RecordingBackend()
    executor = EngineExecutor(backend, "recording")
    buffer = device.empty((3 * KEPT_BINDINGS,), np.float32)
    for size in range(1, KEPT_BINDINGS + 5):
        executor.prepare(0, {"B": size}, {"x": buffer.view(size)})
        assert executor.capture_graph() is True
    for size in range(KEPT_BINDINGS + 5, 3 * KEPT_BINDINGS):
        executor.prepare(0, {"B": size}, {"x": buffer.view(size)})
    backend.calls.clear()
    for size in range(1, KEPT_BINDINGS + 5):
        executor.prepare(0, {"B": size}, {"x": buffer.view(size)})
        executor.execute()
    assert backend.calls == ["launch"] * (KEPT_BINDINGS + 4)


@pytest.mark.only_on("cpu", reason="TensorRT has both")
def test_onnx_runtime_has_neither_profiles_nor_context_memory(executor, device):
    assert executor.required_context_memory_size == 0
    with pytest.raises(EngineError, match="takes no context memory: its library allocates"):
        executor.set_context_memory(device.empty((1000,), np.uint8))
    with pytest.raises(EngineError, match="has no optimization profiles: only TensorRT's plans"):
        executor.get_profile_shape("x", 0, "max")


def test_a_profile_shape_needs_an_input_and_a_selector(executor):
    with pytest.raises(EngineError, match="no input 'nothing', only x"):
        executor.get_profile_shape("nothing", 0, "min")
    with pytest.raises(EngineError, match="no input 'y', only x"):
        executor.get_profile_shape("y", 0, "min")
    with pytest.raises(ValueError, match="selector must be one of min, opt, max, got 'kMAX'"):
        executor.get_profile_shape("x", 0, "kMAX")


def test_a_recorded_graph_is_dropped_with_its_binding(device):
    backend = RecordingBackend()
    executor = EngineExecutor(backend, "recording")
    buffer = device.empty((100,), np.float32)
    for size in (1, *range(2, KEPT_BINDINGS + 2), 1):
        executor.prepare(0, {"B": size}, {"x": buffer.view(size)})
        executor.execute()
        if size == 1:
            executor.record()
    assert backend.calls.count("launch") == 0
    assert backend.calls[-3:] == ["bind", "run (1,)", "capture"]


def test_a_binding_that_is_executed_again_is_recorded(device):
    backend = RecordingBackend()
    executor = EngineExecutor(backend, "recording")
    buffer = device.empty((8,), np.float32)
    for size in (4, 5, 4, 4):
        executor.prepare(0, {"B": size}, {"x": buffer.view(size)})
        executor.execute()
        executor.record_repeated()
    assert backend.calls == ["bind", "run (4,)", "bind", "run (5,)", "run (4,)", "capture", "launch"]


def test_a_binding_is_recorded_once(device):
    backend = RecordingBackend()
    executor = EngineExecutor(backend, "recording")
    executor.prepare(0, {"B": 4}, {"x": device.empty((4,), np.float32)})
    for _ in range(2):
        executor.execute()
        executor.record()
    assert backend.calls == ["bind", "run (4,)", "capture", "launch"]


def test_a_failed_recording_is_not_tried_again(device, caplog):
    backend = RecordingBackend()
    backend.capture = lambda bound, stream: backend.calls.append("capture")
    executor = EngineExecutor(backend, "recording")
    executor.prepare(0, {"B": 4}, {"x": device.empty((4,), np.float32)})
    for _ in range(2):
        executor.execute()
        executor.record()
    assert backend.calls == ["bind", "run (4,)", "capture", "run (4,)"]
    assert not caplog.records  # a device without graphs logs nothing


def test_a_device_lost_during_recording_is_an_error(device):
    def lost(bound, stream):
        raise DeviceLostError("gone")

    backend = RecordingBackend()
    backend.capture = lost
    executor = EngineExecutor(backend, "recording")
    executor.prepare(0, {"B": 4}, {"x": device.empty((4,), np.float32)})
    with pytest.raises(DeviceLostError, match="gone"):
        executor.record()


@pytest.mark.only_on("cpu", "cuda", reason="TensorRT updates the cache in place only")
def test_a_cache_bound_to_one_address_is_not_copied(device, tmp_path):
    # 10 MB, on a GPU 1 GB: a copy takes far longer than writing one row
    capacity, width = (40_000 if device.memory == "cpu" else 4_000_000), 64
    path = save_model(
        tmp_path / "scatter.onnx",
        [helper.make_node("TensorScatter", ["cache", "update", "index"], ["present"], axis=-2)],
        {
            "cache": (FLOAT, [1, 1, capacity, width]),
            "update": (FLOAT, [1, 1, 1, width]),
            "index": (INT64, [1]),
        },
        {"present": (FLOAT, [1, 1, capacity, width])},
    )
    executor = EngineExecutor.open(path, device)
    tensors = {
        "cache": device.zeros((1, 1, capacity, width), np.float32),
        "update": device.zeros((1, 1, 1, width), np.float32),
        "index": device.zeros((1,), np.int64),
    }

    def seconds(present) -> float:
        executor.prepare(0, {}, {**tensors, "present": present})
        times = []
        for _ in range(10):
            device.synchronize()
            start = time.perf_counter()
            executor.execute()
            device.synchronize()
            times.append(time.perf_counter() - start)
        return min(times)

    in_place = seconds(tensors["cache"])
    copied = seconds(device.zeros((1, 1, capacity, width), np.float32))
    assert in_place < copied / 4
