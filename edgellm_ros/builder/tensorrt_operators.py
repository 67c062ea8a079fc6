# SPDX-License-Identifier: Apache-2.0
"""Checks that a graph stays within what TensorRT's ONNX parser documents.

Source: the operator list of the parser (onnx-tensorrt, docs/operators.md) of release 10.15, the first with
TensorScatter; and the documentation of the layers that Attention and TensorScatter become (IAttention,
IKVCacheUpdateLayer).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import onnx_ir as ir

from edgellm_ros.builder.value_types import Values, data_input

OPSETS = range(9, 25)
LARGEST_K = 3839
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
        "Acos Acosh Asin Asinh Atan Atanh Attention AveragePool BatchNormalization Ceil Celu Clip Conv "
        "ConvTranspose Cos Cosh CumSum Einsum Elu Erf Exp Floor Gemm GlobalAveragePool GlobalMaxPool "
        "GroupNormalization HardSigmoid HardSwish Hardmax InstanceNormalization IsInf "
        "LayerNormalization LeakyRelu Log LogSoftmax LpNormalization MatMul MaxPool PRelu "
        "RMSNormalization Reciprocal RotaryEmbedding Round Selu Sigmoid Sin Sinh Softmax Softplus "
        "Softsign Sqrt Tan Tanh ThresholdedRelu",
    ),
    (
        FLOATS | INTEGERS,
        "Abs Add ArgMax ArgMin DepthToSpace Div Equal Gelu Greater GreaterOrEqual IsNaN Less "
        "LessOrEqual Max Mean Min Mod Mul Neg Pad Pow Range ReduceL1 ReduceL2 ReduceLogSum "
        "ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu "
        "ScatterElements ScatterND Sign SpaceToDepth Sub Sum TopK",
    ),
    (
        ANY,
        "Cast Concat Constant ConstantOfShape Expand EyeLike Flatten Gather GatherElements GatherND "
        "Identity OneHot Reshape Shape Size Slice Split Squeeze Tile Transpose Trilu Unsqueeze Where",
    ),
    (BOOL, "And Not Or Xor"),
    (FLOATS | {Type.INT32}, "TensorScatter"),
)
# Inputs that TensorRT must know when it builds: (operator, input, its name in the operator's documentation).
CONSTANT_INPUTS = [
    *((operator, 1, "axes") for operator in SUPPORTED if operator.startswith("Reduce")),
    ("Squeeze", 1, "axes"),
    ("Unsqueeze", 1, "axes"),
    ("CumSum", 1, "axis"),
    ("OneHot", 1, "depth"),
    ("TopK", 1, "K"),
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
    kind = values.type(data_input(node))
    if kind is not None and kind not in SUPPORTED[node.op_type]:
        names = ", ".join(sorted(each.name for each in SUPPORTED[node.op_type]))
        yield f"data of type {kind.name}, supported are {names}"
    for operator, index, name in CONSTANT_INPUTS:
        if node.op_type == operator:
            operand = _input(node, index)
            if operand is not None and operand.const_value is None:
                yield f"{name} must be a constant"
    if node.op_type in RULES:
        yield from RULES[node.op_type](node, values)


def _input(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if len(node.inputs) > index else None


def _has(node: ir.Node, index: int) -> bool:
    return _input(node, index) is not None


def _int(node: ir.Node, name: str, default: int) -> int:
    return node.attributes[name].as_int() if name in node.attributes else default


def _four_dimensions(name: str, rank: int | None) -> Iterator[str]:
    if rank != 4:
        yield f"{name} must have 4 dimensions, has {'an unknown number' if rank is None else rank}"


def _attention(node: ir.Node, values: Values) -> Iterator[str]:
    for index, name in enumerate(("Q", "K", "V", "attn_mask")):
        if _has(node, index):
            yield from _four_dimensions(name, values.rank(node.inputs[index]))
    for index, name in ((4, "past_key"), (5, "past_value"), (6, "nonpad_kv_seqlen")):
        if _has(node, index):
            yield f"input {name} is not supported"
    if len(node.outputs) > 1:
        yield f"it has {len(node.outputs)} outputs, only Y is supported"
    if node.attributes.get("softcap") is not None and node.attributes["softcap"].as_float():
        yield "softcap is not supported"
    if "qk_matmul_output_mode" in node.attributes:
        yield "qk_matmul_output_mode is not supported"
    if _has(node, 3):
        if _int(node, "is_causal", 0):
            yield "it is causal and has attn_mask, TensorRT takes one of them"
        query, mask = values.type(node.inputs[0]), values.type(node.inputs[3])
        if mask not in (None, Type.BOOL, query):
            yield f"attn_mask is {mask.name}, must be BOOL or of Q's type"


def _tensor_scatter(node: ir.Node, values: Values) -> Iterator[str]:
    for index, name in ((0, "past_cache"), (1, "update")):
        yield from _four_dimensions(name, values.rank(node.inputs[index]))
    if _int(node, "axis", -2) not in (-2, 2):
        yield f"axis must be -2, is {_int(node, 'axis', -2)}"
    if "mode" in node.attributes and node.attributes["mode"].as_string() != "linear":
        yield f"mode must be linear, is {node.attributes['mode'].as_string()}"
    cache = node.inputs[0]
    if cache not in values.inputs or node.outputs[0] not in values.outputs:
        yield "past_cache must be an input of the graph and its result an output, to be updated in place"
    elif cache.shape is not None and len(cache.shape) == 4 and not isinstance(cache.shape[2], int):
        yield f"the cache's capacity must be a number, is {cache.shape[2]}"


def _top_k(node: ir.Node, values: Values) -> Iterator[str]:
    if not _int(node, "sorted", 1):
        yield "sorted must be 1"
    operand = _input(node, 1)
    k = None if operand is None else operand.const_value
    if k is not None and int(k.numpy().reshape(-1)[0]) > LARGEST_K:
        yield f"K must be at most {LARGEST_K}, is {int(k.numpy().reshape(-1)[0])}"


def _rotary_embedding(node: ir.Node, values: Values) -> Iterator[str]:
    kind = values.type(_input(node, 3))
    if kind not in (None, Type.INT64):
        yield f"position_ids must be INT64, is {kind.name}"
    yield from _four_dimensions("X", values.rank(node.inputs[0]))


def _scatter_nd(node: ir.Node, values: Values) -> Iterator[str]:
    reduction = node.attributes.get("reduction")
    if reduction is not None and reduction.as_string() != "none":
        yield f"reduction must be none, is {reduction.as_string()}"


def _one_output(node: ir.Node, values: Values) -> Iterator[str]:
    if len(node.outputs) > 1:
        yield f"it has {len(node.outputs)} outputs, only the first is supported"


def _pooling(node: ir.Node, values: Values) -> Iterator[str]:
    yield from _one_output(node, values)
    dilations = node.attributes.get("dilations")
    if dilations is not None and any(size != 1 for size in dilations.as_ints()):
        yield "dilations must be 1"
    if values.rank(node.inputs[0]) not in (None, 4, 5):
        yield "only 2D and 3D pooling is supported"


def _constant(node: ir.Node, values: Values) -> Iterator[str]:
    for name in ("sparse_value", "value_string", "value_strings"):
        if name in node.attributes:
            yield f"{name} is not supported"


RULES: dict[str, Callable[[ir.Node, Values], Iterator[str]]] = {
    "Attention": _attention,
    "TensorScatter": _tensor_scatter,
    "TopK": _top_k,
    "RotaryEmbedding": _rotary_embedding,
    "ScatterND": _scatter_nd,
    "LayerNormalization": _one_output,
    "MaxPool": _pooling,
    "AveragePool": _pooling,
    "Constant": _constant,
}
