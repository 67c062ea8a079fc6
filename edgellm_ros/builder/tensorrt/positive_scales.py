# SPDX-License-Identifier: Apache-2.0
"""Graphs whose 4-bit weights have negative scales, as TensorRT takes them.

TensorRT demands positive scales and no zero points. Where a scale s is negative, the weight s q of an integer
q from -8 to 7 is |s| (p + 1) with p = -1 - q, which has the same range. The 1 is a product of its own, like
zero points (builder/graph/product.py):

    x W  =  x P + b O      P: |s| p, other weights as they are;  b [..., K/group]: sums of x over groups
                           O [K/group,N]: |s| where s is negative, else 0

Both products round, and a part of them cancels: with inputs of one sign (relu(x)^2) in bf16 the error of y is
0.9% where that of x W is 0.2% (K 8192, groups of 64, simulated in NumPy).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.graph.nodes import Nodes
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.onnx_bindings import load_model

INT4 = ir.DataType.INT4


@contextmanager
def positive_scales(model: Path) -> Iterator[Path]:
    """Give a graph with positive scales: `model`, or a temporary file beside it.

    The temporary graph reads the weights that it shares with `model` from their file; its own have the size
    of the 4-bit weights. EngineError for a graph that cannot be read, or in which such weights are not those
    of one product; OSError if it cannot be written.
    """
    loaded = load_model(model)
    graph = model.with_name(f".{model.stem}.{secrets.token_hex(8)}.onnx")  # `export` removes what is left
    weights = graph.with_name(f"{graph.name}.data")
    try:
        with weights.open("wb") as file:
            changed = [_make_positive(loaded.graph, node, model, file) for node in list(loaded.graph)]
        if any(changed):
            ir.save(loaded, graph)
        del loaded
        yield graph if any(changed) else model
    finally:
        graph.unlink(missing_ok=True)
        weights.unlink(missing_ok=True)


# values, scales -- DequantizeLinear -- MatMul (x) ------------------------------------+
#                                                  x -- sums of groups -- MatMul (O) -- Add -->
def _make_positive(graph: ir.Graph, node: ir.Node, model: Path, file: BinaryIO) -> bool:
    """Make the scales of a node positive; return whether one was negative."""
    if node.op_type != "DequantizeLinear" or len(node.inputs) != 2:
        return False
    values, scales = (None if each is None else each.const_value for each in node.inputs)
    if values is None or scales is None or values.dtype != INT4 or len(scales.shape) != 2:
        return False
    numbers = _raw(scales, model).view(scales.dtype.numpy()).reshape(scales.shape.numpy())
    negative = numbers < 0
    if not negative.any():
        return False
    uses = list(node.outputs[0].uses())
    product = uses[0].node
    x, y = product.inputs[0], product.outputs[0]
    if len(uses) != 1 or product.op_type != "MatMul" or x is None:
        raise EngineError(f"{model}: {node.name} has negative scales, and is not the weight of one product")
    groups, group = len(negative), values.shape.numpy()[0] // len(negative)
    turned = np.repeat(negative, group, axis=0).reshape(-1)
    if turned.size % 2:
        turned = np.append(turned, False)
    # A byte has the first of two integers in its lower half. -1 - q is q with all bits inverted.
    bits = turned[0::2] * np.uint8(0x0F) | turned[1::2] * np.uint8(0xF0)
    new = [
        _stored(graph, file, f"{values.name}.turned", values, _raw(values, model) ^ bits),
        _stored(graph, file, f"{scales.name}.positive", scales, np.abs(numbers)),
        _stored(
            graph, file, f"{scales.name}.turn", scales, np.where(negative, -numbers, np.zeros_like(numbers))
        ),
    ]
    for index, value in enumerate(new[:2]):
        old = node.inputs[index]
        assert old is not None
        node.replace_input_with(index, value)
        if not old.uses():
            graph.initializers.pop(str(old.name))
    _add_product(graph, product, x, y, new[2], (groups, group))
    return True


def _add_product(
    graph: ir.Graph, product: ir.Node, x: ir.Value, y: ir.Value, factors: ir.Value, sizes: tuple[int, int]
) -> None:
    """Add to a product y the sums of x over groups times `factors` [K/group,N].

    sizes: number of groups, and inputs of each.
    """
    new = Nodes(f"{product.name}/turned")
    # The users of y get a value of the same name from Add, so that outputs keep their names.
    result = ir.Value(name=y.name, type=y.type, shape=y.shape)
    ir.convenience.replace_all_uses_with(y, result, replace_graph_outputs=True)
    y.name = f"{product.name}/turned/product"
    blocks = new.op("Reshape", x, new.constant([-1, *sizes]))
    sums = new.op("ReduceSum", blocks, new.constant([-1]), keepdims=0)
    offsets = new.op("Reshape", new.op("MatMul", sums, factors), new.op("Shape", y))
    add = ir.node("Add", [y, offsets], outputs=[result], name=f"{product.name}/turned/Add")
    graph.insert_after(product, [*new.nodes, add])


def _raw(tensor: Any, model: Path) -> np.ndarray:
    """Read the bytes of a tensor; the file is closed afterwards."""
    if not isinstance(tensor, ir.ExternalTensor):
        return np.frombuffer(tensor.tobytes(), np.uint8)
    return np.fromfile(
        model.parent / tensor.location,
        np.uint8,
        count=int(tensor.length or 0),
        offset=int(tensor.offset or 0),
    )


def _stored(graph: ir.Graph, file: BinaryIO, name: str, like: Any, contents: np.ndarray) -> ir.Value:
    """Add an initializer of the type and shape of another, and write its contents."""
    path, offset = Path(file.name), file.tell()
    length = file.write(np.ascontiguousarray(contents).view(np.uint8).data)
    tensor = ir.ExternalTensor(
        path.name, offset, length, like.dtype, shape=ir.Shape(like.shape), name=name, base_dir=path.parent
    )
    value = ir.Value(name=name, type=ir.TensorType(like.dtype), shape=tensor.shape, const_value=tensor)
    graph.register_initializer(value)
    return value
