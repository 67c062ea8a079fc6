# SPDX-License-Identifier: Apache-2.0
"""Graphs lowered to opset 23 for an old ONNX Runtime compute the same."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

from edgellm_ros.engine.onnxruntime.opset23 import lower_to_opset23
from fixtures.graphs import linear_with_cache


@pytest.fixture
def model(tmp_path):
    """A file with its weights in external data, as the builder writes them."""
    path = tmp_path / "model.onnx"
    onnx.save(
        linear_with_cache(), path, save_as_external_data=True, location="model.onnx.data", size_threshold=64
    )
    return path


@pytest.fixture
def session(model):
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(model.parent)
    )
    return onnxruntime.InferenceSession(lower_to_opset23(model), options, providers=["CPUExecutionProvider"])


def test_a_lowered_graph_has_opset_23_and_the_same_external_weights(model):
    lowered = onnx.load_from_string(lower_to_opset23(model))
    assert (lowered.opset_import[0].version, lowered.ir_version) == (23, 11)
    assert {node.op_type for node in lowered.graph.node}.isdisjoint({"TensorScatter"})
    (weight,) = [item for item in lowered.graph.initializer if item.name == "w"]
    assert weight.data_location == onnx.TensorProto.EXTERNAL
    assert [value.name for value in lowered.graph.output] == ["y", "present"]


@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (1, 5), (3, 2)])
def test_rows_are_scattered_at_the_write_index_of_each_sequence(session, batch, tokens):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, tokens, 4)).astype(np.float32)
    cache = rng.standard_normal((batch, 1, 8, 4)).astype(np.float32)
    y, present = session.run(None, {"x": x, "cache": cache, "write_index": np.arange(batch) + 1})
    expected = cache.copy()
    for b in range(batch):
        expected[b, 0, b + 1 : b + 1 + tokens] = x[b]
    np.testing.assert_array_equal(present, expected)
    weight = numpy_helper.to_array(linear_with_cache().graph.initializer[0])
    np.testing.assert_allclose(y, x @ weight, atol=1e-6)


def test_cache_is_written_in_place(session):
    cache = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros((1, 1, 8, 4), np.float32))
    binding = session.io_binding()
    binding.bind_cpu_input("x", np.ones((1, 2, 4), np.float32))
    binding.bind_cpu_input("write_index", np.array([3]))
    binding.bind_ortvalue_input("cache", cache)
    binding.bind_ortvalue_output("present", cache)
    binding.bind_output("y", "cpu")
    session.run_with_iobinding(binding)
    assert cache.numpy()[0, 0, :, 0].tolist() == [0, 0, 0, 1, 1, 0, 0, 0]
