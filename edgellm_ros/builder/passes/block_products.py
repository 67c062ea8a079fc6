# SPDX-License-Identifier: Apache-2.0
"""Products with weights in blocks, as one operator of ONNX Runtime.

On a CPU that multiplies in 8 bits, MatMulNBits rounds x to 8 bits in each block of weights (accuracy_level
4), as llama.cpp does, and multiplies integers. The weights stay what they are. One thread of an AMD EPYC
(AVX2), ONNX Runtime 1.31, 2048 x 2048 beyond the core's caches, blocks of 32, us:

    |                          | 1 row | 16 rows | 128 rows |
    |--------------------------|-------|---------|----------|
    | fp32                     | 758   | 1927    | 12150    |
    | 4 bits, x in fp32        | 861   | 2645    | 12530    |
    | 4 bits, x in 8 bits      | 150   | 1512    | 11791    |
    | 8 bits, x in fp32        | 8861  |         |          |
    | 8 bits, x in 8 bits      | 248   | 2272    | 17786    |

The LM head of such a model becomes 8 bits in blocks of 32. Of a GGUF file whose table is in Q8_0 these are
the file's own. A sum of the LM head's input, times 0, takes a NaN to the logits, which rounding would lose.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.graph.graph import FLOAT, ORT_DOMAIN, GraphBuilder, Weight
from edgellm_ros.builder.graph.nodes import Nodes
from edgellm_ros.builder.graph.product import packed_weights
from edgellm_ros.builder.quantization.matrix import INT4, INT8, QuantizedMatrix

BLOCK = 32  # of an LM head
SMALLEST = 1e-30  # of a block's scale
IN_FP32, IN_8_BITS = 1, 4  # accuracy_level: how a CPU multiplies; CUDA multiplies in the graph's type


def multiply_blocks(builder: GraphBuilder, level: int = IN_8_BITS) -> bool:
    """Replace products with weights in blocks; return whether there are any.

    level: IN_8_BITS, for graphs in fp32, or IN_FP32.
    """
    graph = builder.graph
    found = [(node, matrix) for node in list(graph) if (matrix := _matrix(node)) is not None]
    if not found:
        return False
    for node, matrix in found:
        _replace(builder, node, matrix, _name(node), level)
    for node in list(graph):
        if node.op_type == "MatMul" and str(node.name).startswith("/lm_head/"):
            matrix = _rounded(node.inputs[1])
            if matrix is not None:
                _replace(builder, node, matrix, f"{node.inputs[1].name}.blocks", level, keeps_nan=True)  # type: ignore[union-attr]
    graph.opset_imports[ORT_DOMAIN] = 1
    return True


def _name(node: ir.Node) -> str:
    return str(_values(node.inputs[1]).name).removesuffix(".weight")


def _values(weight: ir.Value | None) -> ir.Value:
    """Return the integers of a dequantised weight."""
    assert weight is not None
    node = weight.producer()
    while node is not None and node.op_type in ("Reshape", "DequantizeLinear"):
        weight = node.inputs[0]
        assert weight is not None
        node = weight.producer()
    return weight


def _matrix(node: ir.Node) -> QuantizedMatrix | None:
    """Describe a weight in blocks; None if MatMulNBits does not take it."""
    weight = node.inputs[1] if node.op_type == "MatMul" else None
    source = None if weight is None else weight.producer()
    if source is not None and source.op_type == "Reshape":
        source = source.inputs[0].producer() if source.inputs[0] is not None else None
    if source is None or source.op_type != "DequantizeLinear" or len(source.inputs) != 2:
        return None
    block = source.attributes.get_int("block_size", 0)
    values, scales = (None if each is None else each.const_value for each in source.inputs)
    if not block or not isinstance(values, Weight) or not isinstance(scales, Weight):
        return None
    if values.dtype not in (INT4, INT8):
        return None
    columns = int(values.shape.numpy()[-1])
    rows = int(np.prod(values.shape.numpy())) // columns
    matrix = QuantizedMatrix(
        fan_in=rows,
        fan_out=columns,
        dtype=values.dtype,
        group=block,
        values=lambda: values.numpy().astype(np.int8).reshape(rows, columns),
        scales=lambda: scales.numpy().astype(np.float32).reshape(-1, columns),
    )
    return matrix if packed_weights(matrix) is not None else None


def _rounded(weight: ir.Value | None) -> QuantizedMatrix | None:
    """Round a matrix [K,N] of floats to 8 bits in blocks; None for another value."""
    tensor = None if weight is None else weight.const_value
    if not isinstance(tensor, Weight) or len(tensor.shape) != 2:
        return None
    rows, columns = (int(size) for size in tensor.shape.numpy())
    if rows % BLOCK:
        return None

    def blocks() -> np.ndarray:
        return np.asarray(tensor.numpy()).astype(np.float32).reshape(-1, BLOCK, columns)

    def scales() -> np.ndarray:
        return np.maximum(np.abs(blocks()).max(axis=1), SMALLEST) / np.float32(127)

    def values() -> np.ndarray:
        return np.rint(blocks() / scales()[:, None]).astype(np.int8).reshape(rows, columns)

    return QuantizedMatrix(
        fan_in=rows, fan_out=columns, dtype=INT8, group=BLOCK, values=values, scales=scales
    )


def _replace(
    builder: GraphBuilder,
    node: ir.Node,
    matrix: QuantizedMatrix,
    name: str,
    level: int,
    keeps_nan: bool = False,
) -> None:
    x, weight, old = node.inputs[0], node.inputs[1], node.outputs[0]
    packed = packed_weights(matrix)
    assert packed is not None
    assert x is not None
    new = Nodes(f"{str(node.name).rsplit('/', 1)[0]}/blocks")
    inputs = [builder.weight(f"{name}.{suffix}", *each) for suffix, each in packed.items()]
    sizes = {"K": matrix.fan_in, "N": matrix.fan_out, "block_size": matrix.group}
    how = {"bits": matrix.dtype.bitwidth, "accuracy_level": level}
    result = new.op("MatMulNBits", x, *inputs, domain=ORT_DOMAIN, **sizes, **how)
    if keeps_nan:
        total = new.op("ReduceSum", x, new.constant([-1]), keepdims=1)
        nothing = new.op("Mul", total, builder.constant(0.0, FLOAT))
        result = new.op("Add", result, nothing)
    builder.graph.insert_before(node, new.nodes)
    result.name, result.type, result.shape = old.name, old.type, old.shape
    ir.convenience.replace_all_uses_with(old, result, replace_graph_outputs=True)
    builder.graph.remove([node], safe=True)
    if weight is not None:
        remove_unused(builder.graph, weight)


def remove_unused(graph: ir.Graph, value: ir.Value) -> None:
    """Remove an unused value and the nodes that computed it."""
    if value.uses() or value.is_graph_output():
        return
    node = value.producer()
    if node is None:
        graph.initializers.pop(str(value.name), None)
        return
    inputs = [each for each in node.inputs if each is not None]
    graph.remove(node, safe=True)
    for each in inputs:
        remove_unused(graph, each)
