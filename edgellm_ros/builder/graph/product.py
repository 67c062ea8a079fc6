# SPDX-License-Identifier: Apache-2.0
"""Graphs of products with quantised weights.

The standard graph has DequantizeLinear with blocks of inputs before MatMul. NVIDIA's builder keeps the
weights of such a graph in their 4 or 8 bits. ONNX Runtime joins both into MatMulNBits for 4 bits, if the
scales belong to no other node and a block is a power of two from 16 on. Forms are chosen by measurements of
ONNX Runtime 1.31 (one thread of an AMD EPYC, K 1024, N 2048, 1 row; fp32 weights take 0.17 ms):

    | weights    | form                                   | ms   |
    |------------|----------------------------------------|------|
    | 4 bits     | [K,N], joined into MatMulNBits         | 0.4  |
    | 4 bits     | [K,N], not joined                      | 2.8  |
    | 8 bits     | [K,N], joined into MatMulNBits         | 4.2  |
    | 8 bits     | [K/group,group,N], not joined          | 0.5  |
    | FP8        | any                                    | 5    |

MatMulNBits computes in fp32 here (`session.qdq_matmulnbits_accuracy_level` 1). By default it rounds its input
to 8 bits, which takes 0.09 ms and changes results by up to 5% of their standard deviation.

TensorRT knows no zero points, and no operator knows offsets that are floats: their part is a product of its
own,

    x (W - Z + O) = x W + s O'       s [..., K/group]: sums of x over groups;  O' = offsets - zeros * scales

If x is known to be a matrix, one Gemm computes this product and the sum. On a CPU that takes 0.88 of the time
of a decode step of SmolLM2-135M in Q4_1 (120 such products, one thread of an AMD EPYC, in turns).

A graph for ONNX Runtime alone has MatMulNBits itself, so that other kernels can read its weights in the same
memory (`fused/kernels/quantized.cuh`): ONNX Runtime's CUDA provider uses them in place, as long as its
option `ep.cuda.fpa_intb_gemm` is off. FP8 weights, which MatMulNBits does not take, become floats when such a
graph is loaded; other kernels read the file's.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.checkpoint.strips import row_major
from edgellm_ros.builder.graph.graph import FLOAT, INT64, ORT_DOMAIN, GraphBuilder
from edgellm_ros.builder.quantization.matrix import FLOAT8, INT8, QuantizedMatrix, Read

LARGEST_BLOCK, SMALLEST_BLOCK = 128, 16
UINT8 = ir.DataType.UINT8
# Shape, function that reads the weight, type; None = the graph's.
PackedWeight = tuple[tuple[int, ...], Callable[[], np.ndarray], ir.DataType | None]


def quantized_product(
    graph: GraphBuilder,
    name: str,
    x: ir.Value,
    matrix: QuantizedMatrix,
    zero_points: bool = False,
    flat: bool = False,
) -> ir.Value:
    """Add x times a quantised weight, x [..., K] -> [..., N].

    name: prefix of the weight's tensors; zero_points: the graph is for ONNX Runtime alone; flat: x is [T,K].
    """
    matrix = in_blocks(matrix)
    if matrix.order is not None:
        order, suffix = matrix.order, "packed_order" if zero_points else "order"
        indices = graph.weight(f"{name}.{suffix}", order.shape, lambda: order, INT64)
        x = graph.op("Gather", x, indices, axis=-1)
    if zero_points:
        y = _onnxruntime_product(graph, name, x, matrix)
        if matrix.offsets is None:
            return y
        return graph.op("Add", y, _offset(graph, f"{name}.packed", x, y, matrix, matrix.offsets))
    y = graph.op("MatMul", x, _dequantized(graph, name, matrix))
    if matrix.zeros is None and matrix.offsets is None:
        return y
    if flat:
        with graph.scope("offsets"):
            return graph.op("Gemm", *_sums_and_offsets(graph, name, x, matrix, matrix.added_offsets), y)
    return graph.op("Add", y, _offset(graph, name, x, y, matrix, matrix.added_offsets))


def in_blocks(matrix: QuantizedMatrix) -> QuantizedMatrix:
    """Return the matrix with the groups that graphs have."""
    return matrix if matrix.dtype == FLOAT8 else matrix.in_groups_of(_block(matrix.group))


# values [K,N] -- DequantizeLinear (scales [K/group,N]) -->
def _dequantized(graph: GraphBuilder, name: str, matrix: QuantizedMatrix) -> ir.Value:
    """Add the weight [K,N] in the graph's dtype, without its zero points."""
    values, scales = _values(graph, name, matrix), _scales(graph, name, matrix)
    if matrix.dtype == INT8:
        blocks = graph.op("DequantizeLinear", values, scales, axis=1, block_size=matrix.group)
        return graph.reshape(blocks, [matrix.fan_in, matrix.fan_out])
    if len(scales.shape or ()) == 1:
        return graph.op("DequantizeLinear", values, scales, axis=1)
    return graph.op("DequantizeLinear", values, scales, axis=0, block_size=matrix.group)


# x -- Reshape [..., K/group, group] -- ReduceSum -- MatMul (offsets) -- Reshape -->
def _offset(
    graph: GraphBuilder, name: str, x: ir.Value, y: ir.Value, matrix: QuantizedMatrix, read: Read
) -> ir.Value:
    """Add the product of x with offsets of groups, of the shape of y.

    read: the offsets [K/group,N].
    """
    with graph.scope("offsets"):
        product = graph.op("MatMul", *_sums_and_offsets(graph, name, x, matrix, read))
        return graph.op("Reshape", product, graph.op("Shape", y))


def _sums_and_offsets(
    graph: GraphBuilder, name: str, x: ir.Value, matrix: QuantizedMatrix, read: Read
) -> tuple[ir.Value, ir.Value]:
    """Add the sums of x over groups [T,K/group], and the offsets [K/group,N]."""
    blocks = graph.reshape(x, [-1, matrix.groups, matrix.group])
    sums = graph.op("ReduceSum", blocks, graph.constant([-1]), keepdims=0)
    return sums, graph.weight(f"{name}.offset", (matrix.groups, matrix.fan_out), read)


def _onnxruntime_product(graph: GraphBuilder, name: str, x: ir.Value, matrix: QuantizedMatrix) -> ir.Value:
    """Add the product as ONNX Runtime's CUDA provider takes it.

    The product is a MatMulNBits, if this operator has the group. Otherwise the weights become floats when the
    graph is loaded; integers of a graph in bf16 are multiplied in fp32.
    """
    if matrix.dtype == FLOAT8:
        return _float8_product(graph, name, x, matrix)
    packed = packed_weights(matrix)
    if packed is not None:
        inputs = [graph.weight(f"{name}.{suffix}", *each) for suffix, each in packed.items()]
        sizes = {"K": matrix.fan_in, "N": matrix.fan_out, "block_size": matrix.group}
        # accuracy_level 1: in fp32 on a CPU, which the tests use
        level = {"bits": matrix.dtype.bitwidth, "accuracy_level": 1}
        return graph.op("MatMulNBits", x, *inputs, domain=ORT_DOMAIN, **sizes, **level)
    values, scales = _values(graph, name, matrix), _scales(graph, name, matrix)
    half = graph.dtype == ir.DataType.BFLOAT16
    if half:
        scales = graph.op("Cast", scales, to=int(FLOAT))
    if matrix.dtype == INT8:
        values = graph.reshape(values, [matrix.fan_in, matrix.fan_out])
        scales = graph.reshape(scales, [matrix.groups, matrix.fan_out])
    points = []
    if matrix.zeros is not None:
        zeros = matrix.zeros
        points.append(graph.weight(f"{name}.zero_point", zeros.shape, lambda: zeros, matrix.dtype))
    weight = graph.op("DequantizeLinear", values, scales, *points, axis=0, block_size=matrix.group)
    if half:
        return graph.from_fp32(graph.op("MatMul", graph.to_fp32(x), weight))
    return graph.op("MatMul", x, weight)


# packed [N,K/group,group] -- Cast -- Mul (scales [N,K/group,1]) -- Reshape -- Transpose -- MatMul -->
def _float8_product(graph: GraphBuilder, name: str, x: ir.Value, matrix: QuantizedMatrix) -> ir.Value:
    """Add the product with a weight in FP8, stored by outputs, with scales in fp32."""
    shape = matrix.fan_out, matrix.groups, matrix.group
    packed = graph.weight(
        f"{name}.packed", shape, lambda: row_major(matrix.values().T).reshape(shape), FLOAT8
    )
    scales = graph.weight(f"{name}.packed_scale", shape[:2], lambda: row_major(matrix.scales().T), FLOAT)
    weight = graph.op("Mul", graph.op("Cast", packed, to=int(FLOAT)), graph.reshape(scales, [*shape[:2], 1]))
    weight = graph.from_fp32(graph.reshape(weight, [matrix.fan_out, matrix.fan_in]))
    return graph.op("MatMul", x, graph.op("Transpose", weight, perm=[1, 0]))


def packed_weights(matrix: QuantizedMatrix) -> dict[str, PackedWeight] | None:
    """Return MatMulNBits's inputs by name suffix; None if it refuses the matrix.

    The inputs are `packed` [N,K/group,bytes], the values of a column one after the other; `packed_scale`
    [N,K/group]; if there are zero points `packed_zero_point` [N,bytes]. Integers are unsigned, the first of
    two of 4 bits is in the lower half of a byte. Source: ONNX Runtime, docs/ContribOperators.md.
    """
    group, groups, fan_out, bits = matrix.group, matrix.groups, matrix.fan_out, matrix.dtype.bitwidth
    if matrix.dtype == FLOAT8 or group < SMALLEST_BLOCK or group & (group - 1):
        return None
    weights: dict[str, PackedWeight] = {
        "packed": (
            (fan_out, groups, group * bits // 8),
            lambda: _packed(matrix.values(), bits).reshape(fan_out, groups, -1),
            UINT8,
        ),
        "packed_scale": ((fan_out, groups), lambda: matrix.scales().T, None),
    }
    if matrix.zeros is not None:
        zeros = matrix.zeros
        shape = fan_out, -(-groups * bits // 8)
        weights["packed_zero_point"] = shape, lambda: _packed(zeros, bits), UINT8
    return weights


def _packed(values: np.ndarray, bits: int) -> np.ndarray:
    """Pack signed integers [rows,N] as unsigned ones along the rows -> [N, bytes]."""
    columns = row_major(values.T).view(np.uint8) + np.uint8(1 << (bits - 1))
    if bits == 8:
        return columns
    if columns.shape[1] % 2:
        columns = np.pad(columns, [(0, 0), (0, 1)])
    return columns[:, 0::2] | columns[:, 1::2] << 4


def _values(graph: GraphBuilder, name: str, matrix: QuantizedMatrix) -> ir.Value:
    """Add the values: [K,N], INT8 as [K/group,group,N]."""
    shape: tuple[int, ...] = matrix.fan_in, matrix.fan_out
    if matrix.dtype == INT8:
        shape = matrix.groups, matrix.group, matrix.fan_out
    return graph.weight(
        f"{name}.weight", shape, lambda: row_major(matrix.values()).reshape(shape), matrix.dtype
    )


def _scales(graph: GraphBuilder, name: str, matrix: QuantizedMatrix) -> ir.Value:
    """Add the scales: [K/group,N]; of INT8 [K/group,1,N]; of FP8 with one group [N]."""
    shape: tuple[int, ...] = matrix.groups, matrix.fan_out
    if matrix.dtype == INT8:
        shape = matrix.groups, 1, matrix.fan_out
    elif matrix.dtype == FLOAT8 and matrix.groups == 1:
        shape = (matrix.fan_out,)
    return graph.weight(f"{name}.scale", shape, lambda: matrix.scales().reshape(shape))


def _block(group: int) -> int:
    """Return a group's block: the largest power of two that divides it, up to 128."""
    block = min(group & -group, LARGEST_BLOCK)
    return block if block >= SMALLEST_BLOCK else group
