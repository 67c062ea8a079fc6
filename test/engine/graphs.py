# SPDX-License-Identifier: Apache-2.0
"""Small ONNX graphs for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def make_model(nodes, inputs, outputs, weights=None) -> onnx.ModelProto:
    """inputs and outputs: {name: (type, shape)}; weights: {name: array}."""

    def infos(table):
        return [helper.make_tensor_value_info(name, *entry) for name, entry in table.items()]

    initialisers = [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()]
    graph = helper.make_graph(nodes, "test", infos(inputs), infos(outputs), initialisers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)


def save_model(path: Path, *arguments, **keywords) -> Path:
    onnx.save(make_model(*arguments, **keywords), path)
    return path


def linear_with_cache(capacity: int = 8) -> onnx.ModelProto:
    """x [B,S,4] -> y = x @ w [B,S,3]; x goes into a cache [B,1,C,4] at write_index [B]."""
    rng = np.random.default_rng(0)
    return make_model(
        [
            helper.make_node("MatMul", ["x", "w"], ["y"]),
            helper.make_node("Unsqueeze", ["x", "axis"], ["update"]),
            helper.make_node("TensorScatter", ["cache", "update", "write_index"], ["present"], axis=-2),
        ],
        {
            "x": (FLOAT, ["B", "S", 4]),
            "write_index": (INT64, ["B"]),
            "cache": (FLOAT, ["B", 1, capacity, 4]),
        },
        {"y": (FLOAT, ["B", "S", 3]), "present": (FLOAT, ["B", 1, capacity, 4])},
        {"w": rng.standard_normal((4, 3)).astype(np.float32), "axis": np.array([1])},
    )
