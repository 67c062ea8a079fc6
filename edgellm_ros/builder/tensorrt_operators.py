# SPDX-License-Identifier: Apache-2.0
"""Checks that a graph has only what TensorRT's ONNX parser documents and takes.

Source: the operator list of the parser (onnx-tensorrt, docs/operators.md) of release 10.15, the first with
TensorScatter; the documentation of the layers that Attention and TensorScatter become (IAttention,
IKVCacheUpdateLayer); and the parser and builder of TensorRT for RTX 1.7.1.116, which refuse some graphs that
the list allows. What either of them refuses is refused here.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from edgellm_ros.builder.tensorrt_rules import RULES, operand, symbols
from edgellm_ros.builder.value_types import Values, data_input

OPSETS = range(9, 25)
ANY_RANK = range(9)
Type = ir.DataType
FLOATS = frozenset({Type.FLOAT, Type.FLOAT16, Type.BFLOAT16})
INTEGERS = frozenset({Type.INT32, Type.INT64})
BOOL = frozenset({Type.BOOL})
ANY = FLOATS | INTEGERS | BOOL


def _table(*groups: tuple[frozenset[ir.DataType], str]) -> dict[str, frozenset[ir.DataType]]:
    return {operator: types for types, operators in groups for operator in operators.split()}


# Operators and the types of their data. Loops, branches, quantisation and operators that our graphs do not
# use (recurrent layers, resizing, random numbers) are left out although the parser supports them.
SUPPORTED = _table(
    (
        FLOATS,
        "Acos Acosh Asin Asinh Atan Atanh Attention AveragePool BatchNormalization Ceil Clip Conv "
        "Cos Cosh CumSum Einsum Elu Erf Exp Floor Gelu Gemm GlobalAveragePool GlobalMaxPool "
        "GroupNormalization HardSigmoid Hardmax InstanceNormalization IsInf IsNaN "
        "LayerNormalization LeakyRelu Log LogSoftmax MatMul MaxPool Mean PRelu "
        "RMSNormalization Reciprocal ReduceL2 ReduceLogSum ReduceLogSumExp RotaryEmbedding Round Selu "
        "Sigmoid Sin Sinh Softmax Softplus Softsign Sqrt Tan Tanh TensorScatter ThresholdedRelu",
    ),
    (frozenset({Type.FLOAT, Type.FLOAT16}), "ConvTranspose HardSwish LpNormalization"),
    (frozenset({Type.FLOAT}), "Celu"),
    (
        FLOATS | INTEGERS,
        "Abs Add ArgMax ArgMin DepthToSpace Div Equal Greater GreaterOrEqual Less LessOrEqual Max Min "
        "Mod Mul Neg Pad Pow ReduceL1 ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum "
        "ReduceSumSquare ScatterElements ScatterND Sign SpaceToDepth Sub Sum TopK",
    ),
    (FLOATS | {Type.INT64}, "Relu"),
    (INTEGERS | {Type.FLOAT}, "Range"),
    (
        ANY,
        "Concat Constant ConstantOfShape Expand EyeLike Flatten Gather GatherElements GatherND "
        "Identity OneHot Reshape Shape Size Slice Split Squeeze Tile Transpose Trilu Unsqueeze Where",
    ),
    (ANY | {Type.UINT8}, "Cast"),
    (BOOL, "And Not Or Xor"),
    (FLOATS, "DequantizeLinear"),
)
# Numbers of dimensions of the data; any number up to 8 for operators that are not listed.
RANKS = {
    operator: ranks
    for ranks, operators in (
        (range(2, 9), "ArgMax ArgMin Hardmax LogSoftmax Softmax"),
        (range(3, 9), "GlobalAveragePool GlobalMaxPool GroupNormalization InstanceNormalization"),
        (range(3, 6), "Conv ConvTranspose"),
        (range(4, 6), "AveragePool MaxPool"),
    )
    for operator in operators.split()
}
# Inputs that TensorRT must know when it builds: (operator, input, its name in the operator's documentation).
CONSTANT_INPUTS = [
    *((operator, 1, "axes") for operator in SUPPORTED if operator.startswith("Reduce")),
    ("Squeeze", 1, "axes"),
    ("Unsqueeze", 1, "axes"),
    ("CumSum", 1, "axis"),
    ("OneHot", 1, "depth"),
]


def check_operators(graph: ir.Graph, name: str) -> None:
    """Check a graph.

    ValueError lists the nodes that TensorRT's parser would refuse, and why.
    """
    problems = list(unsupported(graph))
    if problems:
        raise ValueError(f"{name}: TensorRT cannot parse it: {'; '.join(problems)}")


def unsupported(graph: ir.Graph) -> Iterator[str]:
    """Yield a text for each broken rule, beginning with the node's operator and name."""
    opset = graph.opset_imports.get("", 0)
    if opset not in OPSETS:
        yield f"opset {opset}: supported are {OPSETS.start} to {OPSETS.stop - 1}"
    values = Values(graph)
    for node in graph:
        for problem in _problems(node, values):
            yield f"{node.op_type} {node.name!r}: {problem}"
        values.add(node)


def _problems(node: ir.Node, values: Values) -> Iterator[str]:
    if node.domain not in ("", "ai.onnx") or node.op_type not in SUPPORTED:
        yield f"not an operator of the parser's list (domain {node.domain!r})"
        return
    for kind in _types(node, values):
        if kind not in SUPPORTED[node.op_type]:
            names = ", ".join(sorted(each.name for each in SUPPORTED[node.op_type]))
            yield f"data of type {kind.name}, supported are {names}"
    rank, ranks = values.rank(data_input(node)), RANKS.get(node.op_type, ANY_RANK)
    if rank is not None and rank not in ranks:
        yield f"data of rank {rank}, supported are {ranks.start} to {ranks.stop - 1}"
    for operator, index, name in CONSTANT_INPUTS:
        if node.op_type == operator:
            value = operand(node, index)
            known = _is_stored if operator.startswith("Reduce") else _is_known
            if value is not None and not known(value):
                yield f"{name} must be a constant"
    if node.op_type in RULES:
        yield from RULES[node.op_type](node, values)


def _types(node: ir.Node, values: Values) -> Iterator[ir.DataType]:
    """Yield the types of data that a node takes and those that its attributes name."""
    kind = values.type(data_input(node))
    if kind is not None:
        yield kind
    for name in ("to", "dtype"):
        if name in node.attributes:
            yield Type(node.attributes[name].as_int())
    if "value" in node.attributes:
        yield node.attributes["value"].as_tensor().dtype


def _is_stored(value: ir.Value) -> bool:
    maker = value.producer()
    return value.const_value is not None or (maker is not None and maker.op_type == "Constant")


def _is_known(value: ir.Value) -> bool:
    """Whether a value is computed from nothing but constants and shapes of numbers."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        maker = value.producer()
        if _is_stored(value):
            continue
        if maker is None:
            return False
        operands = [each for each in maker.inputs if each is not None]
        if maker.op_type not in ("Shape", "Size") or operands[0].shape is None or symbols(operands[0].shape):
            waiting.extend(operands)
    return True
