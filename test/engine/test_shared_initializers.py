# SPDX-License-Identifier: Apache-2.0
"""Sessions that compute with weights in memory of the caller."""

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from edgellm_ros.builder.graph.graph import GraphBuilder
from edgellm_ros.builder.graph.product import quantized_product
from edgellm_ros.builder.quantization.matrix import QuantizedMatrix
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine.onnxruntime.shared_initializers import values_over
from fixtures.graphs import FLOAT, helper, save_model
from fixtures.on_device import put

pytestmark = pytest.mark.only_on("cpu", "cuda", reason="TensorRT loads plans")
TYPES = {"float32": FLOAT, "float16": 10, "bfloat16": 16}
IN_FILE, SHARED, X = np.array([1, 2, 3]), np.array([10, 20, 30]), np.array([[4, 5, 6]])


@pytest.fixture(params=TYPES)
def dtype(request, device):
    if request.param != "float32" and device.memory == "cpu":
        pytest.skip("on a CPU ONNX Runtime folds the cast of a weight in the file to fp32: --device cuda")
    return np.dtype(getattr(ml_dtypes, request.param, request.param))


@pytest.fixture
def run(device, dtype, tmp_path):
    """Function (shared tensors) -> function that runs y = x + w."""
    kind = TYPES[dtype.name]
    weights = {"w": IN_FILE.astype(dtype)}
    bindings = {"x": (kind, [1, 3])}, {"y": (kind, [1, 3])}
    path = save_model(
        tmp_path / "sum.onnx", [helper.make_node("Add", ["x", "w"], ["y"])], *bindings, weights=weights
    )

    def open_with(shared):
        executor = EngineExecutor.open(path, device, shared=shared)
        tensors = {"x": put(device, X.astype(dtype)), "y": device.zeros((1, 3), dtype)}
        executor.prepare(0, {}, tensors, device.stream)

        def run():
            executor.execute(device.stream)
            return device.download(tensors["y"]).astype(np.float32)

        return run

    return open_with


def test_a_session_computes_with_the_callers_values(device, dtype, run):
    np.testing.assert_array_equal(run({"w": put(device, SHARED.astype(dtype))})(), X + SHARED)
    np.testing.assert_array_equal(run({})(), X + IN_FILE)


def test_the_callers_memory_is_used_in_place(device, dtype, run):
    shared = put(device, SHARED.astype(dtype))
    added = run({"w": shared})
    added()
    device.upload(shared, (2 * SHARED).astype(dtype))
    np.testing.assert_array_equal(added(), X + 2 * SHARED)


def test_a_session_keeps_the_callers_memory(device, dtype, run):
    added = run({"w": put(device, SHARED.astype(dtype))})
    for _ in range(8):  # would take memory that was freed
        put(device, np.zeros(64), dtype)
    np.testing.assert_array_equal(added(), X + SHARED)


def test_a_value_has_address_type_and_shape_of_its_tensor(device, dtype):
    tensor = put(device, np.zeros((2, 5)), dtype)
    value = values_over({"w": tensor}, device.memory)["w"]
    assert (value.data_ptr(), value.shape()) == (tensor.pointer, [2, 5])
    assert value.element_type() == TYPES[dtype.name]


def test_a_name_that_no_graph_has_is_ignored(device, dtype, run):
    shared = {"v": put(device, SHARED.astype(dtype))}
    np.testing.assert_array_equal(run(shared)(), X + IN_FILE)


@pytest.mark.only_on("cuda", reason="on a CPU ONNX Runtime packs a copy")
@pytest.mark.parametrize("kind", ["INT4", "INT8"])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_quantised_weights_are_used_in_place(device, tmp_path, kind, precision):
    graph = GraphBuilder("product", precision)
    dtype = graph.dtype.numpy()
    values, scales = np.ones((64, 32), np.int8), np.ones((2, 32), np.float32)
    matrix = QuantizedMatrix(
        fan_in=64, fan_out=32, dtype=ir.DataType[kind], group=32, values=lambda: values, scales=lambda: scales
    )
    y = quantized_product(graph, "w", graph.input("x", graph.dtype, [1, 64]), matrix, zero_points=True)
    graph.output(y, "y", graph.dtype, [1, 32])
    graph.save(tmp_path / "model.onnx")
    sizes = {"INT4": (16, 0x99, 0xAA), "INT8": (32, 0x81, 0x82)}  # bytes of a group; values of 1 and of 2
    nbytes, ones, twos = sizes[kind]
    shared = put(device, np.full((32, 2, nbytes), ones, np.uint8))
    executor = EngineExecutor.open(tmp_path / "model.onnx", device, shared={"w.packed": shared})
    tensors = {"x": put(device, np.ones((1, 64), dtype)), "y": device.zeros((1, 32), dtype)}
    executor.prepare(0, {}, tensors, device.stream)
    for number, expected in ((ones, 64), (twos, 128)):
        device.upload(shared, np.full((32, 2, nbytes), number, np.uint8))
        executor.execute(device.stream)
        np.testing.assert_array_equal(device.download(tensors["y"]).astype(np.float32), expected)
