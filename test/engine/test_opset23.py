# SPDX-License-Identifier: Apache-2.0
"""Graphs lowered for an ONNX Runtime without opset 24 compute the same."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from graphs import linear_with_cache

from edgellm_ros.engine.opset23 import lower_to_opset23


@pytest.fixture
def sessions(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(
        linear_with_cache(), path, save_as_external_data=True, location="model.onnx.data", size_threshold=64
    )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(tmp_path))
    lowered = lower_to_opset23(path)
    assert {node.op_type for node in onnx.load_from_string(lowered).graph.node} >= {"ScatterND", "MatMul"}
    providers = ["CPUExecutionProvider"]
    return onnxruntime.InferenceSession(lowered, options, providers=providers), onnxruntime.InferenceSession(
        onnx.load(path).SerializeToString(), options, providers=providers
    )


@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (1, 5), (3, 2)])
def test_lowered_graph_gives_the_same_results(sessions, batch, tokens):
    rng = np.random.default_rng(0)
    inputs = {
        "x": rng.standard_normal((batch, tokens, 4)).astype(np.float32),
        "cache": rng.standard_normal((batch, 1, 8, 4)).astype(np.float32),
        "write_index": np.arange(batch) + 1,
    }
    lowered, original = (session.run(None, inputs) for session in sessions)
    for found, expected in zip(lowered, original, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_lowered_graph_writes_the_cache_in_place(sessions):
    cache = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros((1, 1, 8, 4), np.float32))
    binding = sessions[0].io_binding()
    binding.bind_cpu_input("x", np.ones((1, 2, 4), np.float32))
    binding.bind_cpu_input("write_index", np.array([3]))
    binding.bind_ortvalue_input("cache", cache)
    binding.bind_ortvalue_output("present", cache)
    binding.bind_output("y", "cpu")
    sessions[0].run_with_iobinding(binding)
    assert cache.numpy()[0, 0, :, 0].tolist() == [0, 0, 0, 1, 1, 0, 0, 0]
