# SPDX-License-Identifier: Apache-2.0
"""Graphs whose 4-bit weights have negative scales, as TensorRT takes them.

TensorRT demands positive scales and no zero points. Where a scale s is negative, the weight s q of an integer
q from -8 to 7 is |s| (p + 1) with p = -1 - q, which has the same range. The 1 is a product of its own, like
zero points (builder/graph/product.py):

    x W  =  x P + b O      P: |s| p, other weights as they are;  b [..., K/group]: sums of x over groups
                           O [K/group,N]: |s| where s is negative, else 0
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import external_data

INT4 = ir.DataType.INT4


@contextmanager
def positive_scales(model: Path) -> Iterator[Path]:
    """Give a graph with positive scales: `model`, or a temporary file beside it.

    The temporary graph reads the weights that it shares with `model` from their file. OSError if it cannot be
    written.
    """
    loaded = ir.load(model)
    new = [value for node in list(loaded.graph) for value in _make_positive(loaded.graph, node)]
    if not new:
        yield model
        return
    graph = model.with_name(f".{model.stem}.{os.getpid()}.onnx")
    weights = graph.with_suffix(".bin")
    try:
        tensors = [value.const_value for value in new if value.const_value is not None]
        stored = external_data.convert_tensors_to_external(tensors, model.parent, weights.name)
        for value, tensor in zip(new, stored, strict=True):
            value.const_value = tensor
        ir.save(loaded, graph)
        yield graph
    finally:
        graph.unlink(missing_ok=True)
        weights.unlink(missing_ok=True)


# values, scales -- DequantizeLinear -- MatMul (x) ------------------------------------+
#                                                  x -- sums of groups -- MatMul (O) -- Add -->
def _make_positive(graph: ir.Graph, node: ir.Node) -> Sequence[ir.Value]:
    """Make the scales of a node positive; return the new initializers."""
    if node.op_type != "DequantizeLinear" or len(node.inputs) != 2:
        return ()
    values, scales = (None if each is None else each.const_value for each in node.inputs)
    if values is None or scales is None or values.dtype != INT4 or len(scales.shape) != 2:
        return ()
    numbers = scales.numpy()
    negative = numbers < 0
    if not negative.any():
        return ()
    ((product, _),) = node.outputs[0].uses()
    x, y = product.inputs[0], product.outputs[0]
    assert product.op_type == "MatMul"
    assert x is not None
    groups, group = negative.shape[0], values.shape.numpy()[0] // negative.shape[0]
    name = values.name

    def turned() -> np.ndarray:
        integers = values.numpy().astype(np.int8)
        return np.where(np.repeat(negative, group, axis=0), ~integers, integers)

    new = [
        _initializer(graph, f"{name}.turned", INT4, values.shape.numpy(), turned),
        _initializer(graph, f"{name}.positive", scales.dtype, numbers.shape, lambda: np.abs(numbers)),
        _initializer(
            graph, f"{name}.turn", scales.dtype, numbers.shape, lambda: np.where(negative, -numbers, 0)
        ),
    ]
    for index, value in enumerate(new[:2]):
        old = node.inputs[index]
        assert old is not None
        node.replace_input_with(index, value)
        if not old.uses():
            graph.initializers.pop(str(old.name))
    made: list[ir.Node] = []

    def op(op_type: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        made.append(ir.node(op_type, inputs, attributes, name=f"{product.name}/turned/{op_type}_{len(made)}"))
        made[-1].outputs[0].name = f"{made[-1].name}_output_0"
        return made[-1].outputs[0]

    def constant(numbers: list[int]) -> ir.Value:
        return op("Constant", value=ir.tensor(np.array(numbers, np.int64)))

    blocks = op("Reshape", x, constant([-1, groups, group]))
    sums = op("ReduceSum", blocks, constant([-1]), keepdims=0)
    offsets = op("Reshape", op("MatMul", sums, new[2]), op("Shape", y))
    result = op("Add", y, offsets)
    graph.insert_after(product, made)
    result.type, result.shape = y.type, y.shape
    ir.convenience.replace_all_uses_with(y, result, replace_graph_outputs=True)
    for user in (made[-3], made[-1]):  # Shape and Add read the product itself
        for index, given in enumerate(user.inputs):
            if given is result:
                user.replace_input_with(index, y)
    return new


def _initializer(
    graph: ir.Graph,
    name: str,
    dtype: ir.DataType,
    shape: Sequence[int],
    compute: Callable[[], np.ndarray],
) -> ir.Value:
    """Add an initializer whose values are computed when they are written."""

    def read() -> ir.Tensor:
        return ir.Tensor(compute().astype(dtype.numpy()), dtype=dtype)

    tensor = ir.LazyTensor(read, dtype=dtype, shape=ir.Shape(shape), name=name)
    value = ir.Value(name=name, type=ir.TensorType(dtype), shape=tensor.shape, const_value=tensor)
    graph.register_initializer(value)
    return value
