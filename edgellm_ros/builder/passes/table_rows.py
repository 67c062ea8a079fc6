# SPDX-License-Identifier: Apache-2.0
"""Embedding tables in 8 bits, for ONNX Runtime.

Only the rows that a run reads become floats. TensorRT takes weights in 8 bits for products alone (RTX 1.7.1),
so the standard graph has the same values as floats.
"""

from __future__ import annotations

import onnx_ir as ir

from edgellm_ros.builder.graph.graph import Weight
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.graph.nodes import Nodes
from edgellm_ros.builder.passes.block_products import remove_unused
from edgellm_ros.builder.quantization.matrix import QuantizedMatrix


def read_rows_in_8_bits(builder: ModelBuilder) -> bool:
    """Replace tables whose weights are quantised; return whether there are any."""
    found = False
    for node in list(builder.graph):
        table = node.inputs[0] if node.op_type == "Gather" else None
        if table is None or not isinstance(table.const_value, Weight):
            continue
        module, _, tensor = str(table.name).rpartition(".")
        matrix = builder.weights.matrix(module) if tensor == "weight" else None
        if matrix is not None:
            _replace(builder, node, module, matrix)
            remove_unused(builder.graph, table)
            found = True
    return found


# values [N,K/group,group] -- Gather -- Cast -- Mul -- Reshape [-1,K] -->
# scales [N,K/group,1] ------ Gather -----------+
def _replace(builder: ModelBuilder, node: ir.Node, name: str, matrix: QuantizedMatrix) -> None:
    """Replace the rows [L,K] of a table [N,K].

    The matrix [K,N] has no zero points.
    """
    shape, indices, old = (matrix.fan_out, matrix.groups, matrix.group), node.inputs[1], node.outputs[0]
    assert indices is not None
    values = builder.weight(f"{name}.rows", shape, lambda: matrix.values().T.reshape(shape), matrix.dtype)
    scales = builder.weight(
        f"{name}.rows_scale", (*shape[:2], 1), lambda: matrix.scales().T.reshape(*shape[:2], 1)
    )
    new = Nodes(f"{str(node.name).rsplit('/', 1)[0]}/rows")
    rows, factors = (new.op("Gather", each, indices, axis=0) for each in (values, scales))
    rows = new.op("Cast", rows, to=int(builder.dtype))
    size = builder.constant([-1, matrix.fan_in])
    result = new.op("Reshape", new.op("Mul", rows, factors), size)
    builder.graph.insert_before(node, new.nodes)
    result.name, result.type, result.shape = old.name, old.type, old.shape
    ir.convenience.replace_all_uses_with(old, result, replace_graph_outputs=True)
    builder.graph.remove([node], safe=True)
