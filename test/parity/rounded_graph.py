# SPDX-License-Identifier: Apache-2.0
"""Runs a graph on the CPU as a GPU does in half precision.

Sums are fp32, and results are rounded to the graph's type. ONNX Runtime has no kernels for bf16 on a CPU.
ONNX's reference evaluator has, but its operators compute in NumPy and add up in bf16; those that add up are
replaced.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_attention import Attention as ReferenceAttention

TYPES = {
    onnx.TensorProto.FLOAT: np.float32,
    onnx.TensorProto.FLOAT16: np.float16,
    onnx.TensorProto.BFLOAT16: ml_dtypes.bfloat16,
    onnx.TensorProto.INT64: np.int64,
    onnx.TensorProto.BOOL: np.bool_,
}


class MatMul(OpRun):
    op_domain = ""

    def _run(self, a, b):
        return (np.matmul(a.astype(np.float32), b.astype(np.float32)).astype(a.dtype),)


class RMSNormalization(OpRun):
    op_domain = ""

    def _run(self, x, scale, axis=-1, epsilon=1e-5, stash_type=1):
        y = x.astype(np.float32)
        y = y / np.sqrt(np.square(y).mean(axis, keepdims=True) + np.float32(epsilon))
        return ((y * scale.astype(np.float32)).astype(x.dtype),)


class Attention(ReferenceAttention):
    op_domain = ""

    def _run(self, q, k, v, *others, **attributes):
        outputs = super()._run(*(x.astype(np.float32) for x in (q, k, v)), *others, **attributes)
        return tuple(x if x is None else x.astype(q.dtype) for x in outputs)


class GatherElements(OpRun):  # the reference's own takes at most 64 rows
    op_domain = ""

    def _run(self, x, index, axis=0):
        return (np.take_along_axis(x, index, axis),)


class RoundedGraph:
    """One `model.onnx`, with the interface of `engine_graphs.Graph`."""

    def __init__(self, path: Path) -> None:
        model = onnx.load(path)
        self.evaluator = ReferenceEvaluator(
            model, new_ops=[MatMul, RMSNormalization, Attention, GatherElements]
        )
        self.outputs = [value.name for value in model.graph.output]
        self.inputs = {}
        for value in model.graph.input:
            tensor = value.type.tensor_type
            shape = [dim.dim_param or dim.dim_value for dim in tensor.shape.dim]
            self.inputs[value.name] = SimpleNamespace(shape=shape, type=TYPES[tensor.elem_type])

    def __call__(self, **inputs) -> dict[str, np.ndarray]:
        feeds = {name: np.asarray(value).astype(self.inputs[name].type) for name, value in inputs.items()}
        return dict(zip(self.outputs, self.evaluator.run(None, feeds), strict=True))
