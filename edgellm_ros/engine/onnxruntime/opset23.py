# SPDX-License-Identifier: Apache-2.0
"""Lower graphs to opset 23, for an ONNX Runtime before 1.24.

The last ONNX Runtime for Python 3.10 is 1.23.
TensorScatter is the only operator in the graphs that opset 23 lacks. It becomes a ScatterND, which also works
in place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir

OPSET = 23
IR_VERSION = 11


def lower_to_opset23(path: Path) -> bytes:
    """Serialise the graph of a file as a model of opset 23.

    The weights stay in the file's external data.
    """
    model = ir.load(path)
    graph = model.graph
    index: ir.Value | None = None
    for node in list(graph):
        if node.op_type != "TensorScatter":
            continue
        cache, update, write_index = [value for value in node.inputs if value is not None]
        if index is None:  # all caches of a graph have one shape and one write index
            nodes, index = _row_index(update, write_index)
            graph.insert_before(node, nodes)
        scatter = ir.node("ScatterND", [cache, index, update], name=node.name, num_outputs=1)
        graph.insert_before(node, scatter)
        old, new = node.outputs[0], scatter.outputs[0]
        new.name, new.type, new.shape = old.name, old.type, old.shape
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        graph.remove(node, safe=True)
    graph.opset_imports[""] = OPSET
    model.ir_version = IR_VERSION
    return ir.to_proto(model).SerializeToString()


def _row_index(update: ir.Value, write_index: ir.Value) -> tuple[list[ir.Node], ir.Value]:
    """Make nodes for [B,H,S,3]: sequence, head and cache row of each row of `update`.

    `update` [B,H,S,D], `write_index` [B]. Returns the nodes and their result.
    """
    nodes: list[ir.Node] = []

    def op(op_type: str, *inputs: ir.Value, outputs: int = 1, **attributes: Any) -> ir.Value:
        name = f"/row_index/{op_type}_{len(nodes)}"
        nodes.append(ir.node(op_type, inputs, attributes, name=name, num_outputs=outputs))
        for i, value in enumerate(nodes[-1].outputs):
            value.name = f"{name}_output_{i}"
        return nodes[-1].outputs[0]

    def constant(value: int | list[int]) -> ir.Value:
        return op("Constant", value=ir.tensor(value, dtype=ir.DataType.INT64))

    shape = op("Shape", update, start=0, end=3)
    parts = []
    for axis, others in ((0, [1, 2]), (1, [0, 2]), (2, [0, 1])):
        count = op("Gather", shape, constant(axis))
        numbers = op("Unsqueeze", op("Range", constant(0), count, constant(1)), constant(others))
        if axis == 2:
            numbers = op("Add", numbers, op("Unsqueeze", write_index, constant([1, 2])))
        parts.append(op("Unsqueeze", op("Expand", numbers, shape), constant([-1])))
    return nodes, op("Concat", *parts, axis=-1)
