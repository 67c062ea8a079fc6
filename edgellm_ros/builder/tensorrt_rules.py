# SPDX-License-Identifier: Apache-2.0
"""What TensorRT refuses of single operators: ranks, attributes, inputs, outputs.

Each rule yields a text for everything in a node that breaks it. The sources are those of tensorrt_operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import onnx_ir as ir

from edgellm_ros.builder.quantization.matrix import QUANTIZED
from edgellm_ros.builder.value_types import Values

LARGEST_K = 3839
Type = ir.DataType


def symbols(shape: ir.Shape) -> list[str]:
    """Return the dimensions that are no numbers."""
    return [str(size) for size in shape if not isinstance(size, int)]


def operand(node: ir.Node, index: int) -> ir.Value | None:
    """Return an input of a node; None if it is left out."""
    return node.inputs[index] if len(node.inputs) > index else None


def _has(node: ir.Node, index: int) -> bool:
    return operand(node, index) is not None


def _shape(node: ir.Node, index: int) -> ir.Shape | None:
    value = operand(node, index)
    return None if value is None else value.shape


def _int(node: ir.Node, name: str, default: int) -> int:
    return node.attributes[name].as_int() if name in node.attributes else default


def _four_dimensions(name: str, rank: int | None) -> Iterator[str]:
    if rank != 4:
        yield f"{name} must have 4 dimensions, has {'an unknown number' if rank is None else rank}"


def _attention(node: ir.Node, values: Values) -> Iterator[str]:
    for index, name in enumerate(("Q", "K", "V", "attn_mask")):
        if _has(node, index):
            yield from _four_dimensions(name, values.rank(node.inputs[index]))
    if node.inputs[0] is node.inputs[1]:
        yield "Q and K are the same tensor, which crashes the builder of TensorRT for RTX 1.7.1"
    query = values.type(node.inputs[0])
    for index, name in ((1, "K"), (2, "V")):
        kind = values.type(node.inputs[index])
        if query is not None and kind not in (None, query):
            yield f"{name} is {kind.name}, must be of Q's type"
    key, value = _shape(node, 1), _shape(node, 2)
    if key is not None and value is not None:
        pairs = zip(key, value, strict=False)
        if any(isinstance(k, int) and isinstance(v, int) and k != v for k, v in pairs):
            yield "K and V have different shapes"
    for index, name in ((4, "past_key"), (5, "past_value"), (6, "nonpad_kv_seqlen")):
        if _has(node, index):
            yield f"input {name} is not supported"
    if len(node.outputs) > 1:
        yield f"it has {len(node.outputs)} outputs, only Y is supported"
    if node.attributes.get("softcap") is not None and node.attributes["softcap"].as_float():
        yield "softcap is not supported"
    for name in ("qk_matmul_output_mode", "softmax_precision"):
        if name in node.attributes:
            yield f"{name} is not supported"
    if _has(node, 3):
        if _int(node, "is_causal", 0):
            yield "it is causal and has attn_mask, TensorRT takes one of them"
        mask = values.type(node.inputs[3])
        if query is not None and mask not in (None, Type.BOOL, query):
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
    elif sum(use.node.op_type == "TensorScatter" for use in cache.uses()) > 1:
        yield "another node updates the same cache"
    elif cache.shape is not None and len(cache.shape) == 4 and not isinstance(cache.shape[2], int):
        yield f"the cache's capacity must be a number, is {cache.shape[2]}"


def _top_k(node: ir.Node, values: Values) -> Iterator[str]:
    if not _int(node, "sorted", 1):
        yield "sorted must be 1"
    value = operand(node, 1)
    k = None if value is None else value.const_value
    if k is not None and int(k.numpy().reshape(-1)[0]) > LARGEST_K:
        yield f"K must be at most {LARGEST_K}, is {int(k.numpy().reshape(-1)[0])}"


def _rotary_embedding(node: ir.Node, values: Values) -> Iterator[str]:
    kind = values.type(operand(node, 3))
    if kind not in (None, Type.INT64):
        yield f"position_ids must be INT64, is {kind.name}"


def _scatter(node: ir.Node, values: Values) -> Iterator[str]:
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


def _batch_normalization(node: ir.Node, values: Values) -> Iterator[str]:
    if _int(node, "training_mode", 0):
        yield "training_mode is not supported"


def _eye_like(node: ir.Node, values: Values) -> Iterator[str]:
    shape = _shape(node, 0)
    if shape is not None and symbols(shape):
        yield f"the dimensions must be numbers, one is {symbols(shape)[0]}"


def _hardmax(node: ir.Node, values: Values) -> Iterator[str]:
    shape, axis = _shape(node, 0), _int(node, "axis", -1)
    if shape is not None and len(shape) and not isinstance(shape[axis], int):
        yield f"the dimension of axis {axis} must be a number, is {shape[axis]}"


def _range(node: ir.Node, values: Values) -> Iterator[str]:
    for name, value in zip(("start", "limit", "delta"), node.inputs, strict=False):
        if value in values.inputs and values.type(value) == Type.FLOAT:
            yield f"{name} of type FLOAT must not be an input of the graph"


def _constant(node: ir.Node, values: Values) -> Iterator[str]:
    for name in ("sparse_value", "value_string", "value_strings"):
        if name in node.attributes:
            yield f"{name} is not supported"


def _dequantize_linear(node: ir.Node, values: Values) -> Iterator[str]:
    kind = values.type(node.inputs[0])
    if kind not in (None, *QUANTIZED):
        yield f"x is {kind.name}, supported are {', '.join(each.name for each in QUANTIZED)}"
    if _has(node, 2):
        yield "zero points are not supported"


RULES: dict[str, Callable[[ir.Node, Values], Iterator[str]]] = {
    "Attention": _attention,
    "TensorScatter": _tensor_scatter,
    "TopK": _top_k,
    "RotaryEmbedding": _rotary_embedding,
    "ScatterElements": _scatter,
    "ScatterND": _scatter,
    "LayerNormalization": _one_output,
    "BatchNormalization": _batch_normalization,
    "EyeLike": _eye_like,
    "Hardmax": _hardmax,
    "Range": _range,
    "MaxPool": _pooling,
    "AveragePool": _pooling,
    "Constant": _constant,
    "DequantizeLinear": _dequantize_linear,
}
