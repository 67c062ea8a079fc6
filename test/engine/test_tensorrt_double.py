# SPDX-License-Identifier: Apache-2.0
"""TensorRT's double refuses what TensorRT refuses.

Therefore tests that use it show something.
"""

import sys

import numpy as np
import onnx
import pytest

from doubles import tensorrt_double as trt
from doubles.deferred_device import DeferredDevice
from edgellm_ros.builder.tensorrt.plan import PlanOptions, serialize_plan
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.optimization_profile import Profile, Range
from edgellm_ros.engine.tensorrt.library import library_log
from fixtures.graphs import linear_with_cache
from fixtures.on_device import put

pytestmark = pytest.mark.only_on("cpu", reason="these tests bring their own device")


def user_managed(engine) -> trt.IRuntimeConfig:
    config = engine.create_runtime_config()
    config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
    return config


@pytest.fixture
def log(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", trt)
    log = library_log(trt)
    log.take()
    return log


@pytest.fixture
def host() -> DeferredDevice:
    return DeferredDevice("tensorrt")


@pytest.fixture
def plan(log, tmp_path) -> bytes:
    onnx.save(linear_with_cache(), tmp_path / "model.onnx")
    profiles = [
        Profile("prefill", {"B": Range(1, 1, 4), "S": Range(2, 2, 8)}),
        Profile("decode", {"B": Range(1, 1, 4), "S": Range(1, 1, 1)}),
    ]
    return bytes(serialize_plan(tmp_path / "model.onnx", profiles, PlanOptions(), trt, ["host"]))


@pytest.fixture
def tensors(host):
    cache = put(host, np.zeros((1, 1, 8, 4)), np.float32)
    return {
        "x": put(host, np.ones((1, 2, 4)), np.float32),
        "write_index": put(host, [0]),
        "cache": cache,
        "y": host.zeros((1, 2, 3), np.float32),
        "present": cache,
    }


@pytest.fixture
def context(host, log, plan, tensors):
    """An execution context that is ready to run."""
    engine = trt.Runtime(log).deserialize_cuda_engine(plan)
    context = engine.create_execution_context(user_managed(engine))
    memory = host.empty((engine.device_memory_size_v2,), np.uint8)
    context.set_device_memory(memory.pointer, memory.size)
    context.memory_for_tests = memory
    for name, tensor in tensors.items():
        if name in ("x", "write_index", "cache"):
            assert context.set_input_shape(name, tensor.shape)
        assert context.set_tensor_address(name, tensor.pointer)
    return context


def run(context, host) -> bool:
    return context.execute_async_v3(host.stream.handle)


def test_a_ready_context_runs_when_the_caller_waits(context, host, tensors, log):
    assert run(context, host), log.take()
    assert host.download(tensors["y"]).any()


def test_a_switch_of_profiles_resets_shapes_and_addresses(context, host, log):
    assert context.set_optimization_profile_async(0, host.stream.handle)
    assert context.infer_shapes() == ["x", "write_index", "cache"]
    assert not run(context, host)
    assert "input shapes of x, write_index, cache are not set" in log.take()


def test_a_missing_address_is_an_error(context, host, tensors, log):
    context.set_optimization_profile_async(0, host.stream.handle)
    for name in ("x", "write_index", "cache"):
        context.set_input_shape(name, tensors[name].shape)
    assert not run(context, host)
    assert "address is not set for x" in log.take()


def test_addresses_are_checked_against_allocated_memory(context, host, tensors, log):
    context.set_tensor_address("y", 256)
    assert not run(context, host)
    assert "y at 0x100 is no memory of 24 bytes" in log.take()


def test_unaligned_addresses_are_refused(context, tensors, log):
    assert not context.set_tensor_address("x", tensors["x"].pointer + 16)
    assert "not aligned to 256 bytes" in log.take()


def test_aliased_outputs_must_have_their_inputs_address(context, host, log):
    other = host.zeros((1, 1, 8, 4), np.float32)
    context.set_tensor_address("present", other.pointer)
    assert not run(context, host)
    assert "present is aliased with cache" in log.take()


def test_shapes_outside_of_the_profile_are_refused(context, log):
    assert not context.set_input_shape("x", (1, 9, 4))
    assert not context.set_input_shape("x", (1, 2, 5))
    assert not context.set_input_shape("y", (1, 2, 3))
    assert "x [1, 9, 4] is outside the range of profile 0" in log.take()


def test_intermediate_memory_must_be_set_and_large_enough(host, log, plan, context):
    context._memory = (0, 0)
    assert not run(context, host)
    assert "is not set" in log.take()
    context.set_device_memory(context.memory_for_tests.pointer, 5)
    assert "device memory of 5 bytes" in log.take()


def test_a_recorded_context_must_have_run_before_and_cannot_change(context, host, tensors, log):
    def record():
        if not run(context, host):
            raise EngineError(log.take())

    with pytest.raises(EngineError, match="shapes changed since the last enqueue"):
        host.capture(record)
    record()
    host.capture(record)
    assert not context.set_input_shape("x", (1, 2, 4))
    assert not context.set_tensor_address("x", tensors["x"].pointer)
    assert log.take().count("was captured in a graph") == 2


def test_arguments_of_a_wrong_type_are_refused(context, log):
    for call in (
        lambda: context.set_tensor_address("x", "0"),
        lambda: context.set_input_shape(5, (1, 2)),
        lambda: context.execute_async_v3(None),
        lambda: trt.Runtime(None),
    ):
        with pytest.raises(TypeError):
            call()
