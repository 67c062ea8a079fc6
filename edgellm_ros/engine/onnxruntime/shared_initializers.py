# SPDX-License-Identifier: Apache-2.0
"""Weights of an ONNX Runtime session in memory of ours.

Other kernels read them too. A session uses such an initializer in place if it is on the device where the
session wants it. ONNX Runtime's CUDA provider takes no memory for it (1.31, H200, fp16 and bf16). Its CPU
provider packs a copy of matrices. The values must be those in the file, with which graph optimisers may
compute constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from edgellm_ros.engine.tensor import Tensor

NUMBERS = {"bfloat16": 16, "float8_e4m3fn": 17}  # ONNX's, of types that NumPy lacks


def element_type(dtype: np.dtype) -> Any:
    """Return a type as bindings of ONNX Runtime take it."""
    return NUMBERS.get(dtype.name, dtype.type)


def values_over(tensors: Mapping[str, Tensor], memory: str) -> dict[str, Any]:
    """Make an `OrtValue` on the memory of each tensor, for `open_session`.

    memory: "cpu" or "cuda", the memory of the tensors, which must live as long as the values.
    """
    if not tensors:
        return {}
    bound, values = _binding(), {}
    for name, tensor in tensors.items():
        # An output that is bound by address is a value whose memory ONNX Runtime does not own.
        bound.bind_output("y", memory, 0, element_type(tensor.dtype), tensor.shape, tensor.pointer)
        values[name] = bound.get_outputs()[0]
        bound.clear_binding_outputs()
    return values


def _binding() -> Any:
    """Make a binding of a session with one output; its graph is never run."""
    import onnx_ir as ir
    import onnxruntime

    kind = ir.TensorType(ir.DataType.FLOAT)
    x, y = (ir.Value(name=name, type=kind, shape=ir.Shape([1])) for name in "xy")
    graph = ir.Graph([x], [y], nodes=[ir.Node("", "Identity", [x], outputs=[y])], opset_imports={"": 19})
    model = ir.to_proto(ir.Model(graph, ir_version=9)).SerializeToString()
    return onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).io_binding()
