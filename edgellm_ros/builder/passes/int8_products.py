# SPDX-License-Identifier: Apache-2.0
"""Graphs for a CPU that multiply in 8 bits.

A product of x with a constant matrix W becomes a product of integers. W has a scale for each column, computed
when the file is written, and x a scale for each row, computed in the run:

    x W  ~  r * s * ((q - 128) (w - 128))      q, w uint8;  r [rows,1] = max |x|;  s [N] = max |W| / 127 / 127

Sums of integers are exact, so the bits of a row depend neither on other rows nor on their number, also where
products in fp32 compute a single row in another way. Values and weights have no sign, because ONNX Runtime's
kernels for AVX2 saturate sums of unsigned times signed values.

A NaN in x must not vanish in the conversion to integers: ReduceMax drops it, so the mean of the row, which is
never above max |x|, takes it to r. The LM head of the language model stays as it is, and so do the first
projections of recurrent layers.

Where rows may depend on each other, x has one scale: in the vision tower, which encodes one image at a time,
and in draft heads, whose guesses do not change answers. ONNX Runtime has one operator for such a product.

One thread of an AMD EPYC (AVX2) beside other load, ONNX Runtime 1.31, matrices that are not in the core's
caches; conversions included; us:

    |             | 1 row     | 6 rows    | 106 rows  | 280 rows    |
    |-------------|-----------|-----------|-----------|-------------|
    | 256 x 1280  | 92 -> 52  | 126 -> 72 | 846 -> 611 | 2090 -> 1592 |
    | 640 x 256   | 67 -> 47  | 81 -> 54  | 471 -> 310 | 1206 -> 903  |

MatMulNBits, which keeps a scale for each group of inputs, takes 170 us for 6 rows and 4000 us for 106 rows of
256 x 1280 in 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.graph.graph import FLOAT, ORT_DOMAIN, GraphBuilder, Weight
from edgellm_ros.builder.graph.nodes import Nodes
from edgellm_ros.builder.passes.block_products import multiply_blocks, remove_unused

UINT8 = ir.DataType.UINT8
TOP, ZERO = 127, 128  # the largest magnitude, and the value that stands for 0
SMALLEST = 1e-30  # of a column's scale; a row of zeros has the scale 0
# Weights in fp32: projections of recurrent layers make decays, whose errors add up over all tokens; offsets
# of groups are small, so that rounding x takes longer than the product.
KEPT = (".in_proj", ".offset")
NORMS = ("RMSNormalization", "LayerNormalization")  # one NaN makes the whole row NaN


@dataclass(frozen=True)
class _Matrix:
    """A constant, usually a matrix [K,N]; `read` computes it in fp32."""

    name: str  # of the weight
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]

    def scales(self) -> np.ndarray:
        """Compute the scales of the columns [N]."""
        return _scales(self.read())

    def values(self) -> np.ndarray:
        """Compute the matrix as integers [K,N]."""
        matrix = self.read()
        return (np.rint(matrix / _scales(matrix)) + ZERO).astype(np.uint8)


def _scales(matrix: np.ndarray) -> np.ndarray:
    return np.maximum(np.abs(matrix).max(axis=0), SMALLEST) / np.float32(TOP)


# x --+-- Abs -- ReduceMax --+-- Max -- r --+------------------------------------------------------+
#     +------ ReduceMean ----+              |                                                      |
#     +------------------------------------ Div -- QuantizeLinear -- MatMulIntegerToFloat (W) -- Mul -->
def multiply_in_int8(
    builder: GraphBuilder, lm_head: bool = True, by_rows: bool = True, modules: tuple[str, ...] = ("",)
) -> bool:
    """Replace products with constant matrices; return whether there are any.

    lm_head: whether the LM head is replaced too. by_rows: whether x has a scale for each row; else it has one
    scale, which is faster, but then a row depends on the others, and a NaN may vanish. modules: what the
    names of replaced weights begin with. Only graphs in fp32, ValueError for others.
    """
    if builder.dtype != FLOAT:
        raise ValueError("8-bit products for a CPU need precision fp32")
    graph, rows = builder.graph, dict[ir.Value, tuple[ir.Value, ir.Value]]()
    has_blocks = multiply_blocks(builder)
    replaced = []
    for node in list(graph):
        if node.op_type != "MatMul" or (not lm_head and str(node.name).startswith("/lm_head/")):
            continue
        x, weight = node.inputs
        matrix = _matrix(weight)
        if x is None or weight is None or matrix is None or len(matrix.shape) != 2:
            continue
        if any(part in matrix.name for part in KEPT) or not matrix.name.startswith(modules):
            continue
        new, last = Nodes(f"{str(node.name).rsplit('/', 1)[0]}/int8"), node
        weights = builder.weight(f"{matrix.name}.uint8", matrix.shape, matrix.values, UINT8)
        scales = builder.weight(f"{matrix.name}.uint8_scale", matrix.shape[1:], matrix.scales, FLOAT)
        zero = builder.constant(ZERO, UINT8)
        if by_rows:
            if x not in rows:
                rows[x] = _integers(builder, new, x)
            values, scale = rows[x]
            step = builder.constant(1 / TOP, FLOAT)
            inputs = values, weights, step, scales, zero, zero
            result = new.op("Mul", new.op("MatMulIntegerToFloat", *inputs, domain=ORT_DOMAIN), scale)
        else:
            addition, bias = _bias(node)
            last = node if addition is None else addition
            biases = () if bias is None else (bias,)
            result = new.op("DynamicQuantizeMatMul", x, weights, scales, zero, *biases, domain=ORT_DOMAIN)
        graph.insert_before(node, new.nodes)
        old = last.outputs[0]
        result.name, result.type, result.shape = old.name, old.type, old.shape
        ir.convenience.replace_all_uses_with(old, result, replace_graph_outputs=True)
        graph.remove([node] if last is node else [last, node], safe=True)
        replaced.append(weight)
    for weight in replaced:
        remove_unused(graph, weight)
    if replaced:
        graph.opset_imports[ORT_DOMAIN] = 1
    return bool(replaced) or has_blocks


def _bias(product: ir.Node) -> tuple[ir.Node | None, ir.Value | None]:
    """Find the addition of a bias, and the bias; None for none.

    The addition is all that uses the product.
    """
    uses = list(product.outputs[0].uses())
    addition = uses[0].node if len(uses) == 1 else None
    if addition is None or addition.op_type != "Add" or product.outputs[0].is_graph_output():
        return None, None
    bias = addition.inputs[1 - uses[0].idx]
    known = bias is not None and isinstance(bias.const_value, Weight) and len(bias.const_value.shape) == 1
    return (addition, bias) if known else (None, None)


def _integers(builder: GraphBuilder, new: Nodes, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Add the values of x as integers, and the scale of each row times TOP."""
    last, producer = builder.constant([-1]), x.producer()
    scale = new.op("ReduceMax", new.op("Abs", x), last, keepdims=1)
    if producer is None or producer.op_type not in NORMS:
        scale = new.op("Max", scale, new.op("ReduceMean", x, last, keepdims=1))
    step, zero = builder.constant(1 / TOP, FLOAT), builder.constant(ZERO, UINT8)
    return new.op("QuantizeLinear", new.op("Div", x, scale), step, zero), scale


def _matrix(value: ir.Value | None) -> _Matrix | None:
    """Describe a weight or a dequantised weight; None for other values."""
    if value is None:
        return None
    node, tensor = value.producer(), value.const_value
    if node is None:
        if not isinstance(tensor, Weight):
            return None
        shape = tuple(tensor.shape.numpy())
        return _Matrix(str(value.name), shape, lambda: np.asarray(tensor.numpy()).astype(np.float32))
    source = _matrix(node.inputs[0]) if len(node.inputs) == 2 else None
    constant = node.inputs[1].const_value if source is not None and node.inputs[1] is not None else None
    if source is None or constant is None:
        return None
    if node.op_type == "Reshape":
        shape = tuple(int(size) for size in constant.numpy())
        return _Matrix(source.name, shape, lambda: source.read().reshape(shape))
    axis, block = node.attributes.get_int("axis", 1), node.attributes.get_int("block_size", 0)
    if node.op_type != "DequantizeLinear" or not (block or axis == len(source.shape) - 1):
        return None

    def dequantized() -> np.ndarray:
        scales = constant.numpy().astype(np.float32)
        return source.read() * (np.repeat(scales, block, axis=axis) if block else scales)

    return _Matrix(source.name, source.shape, dequantized)
