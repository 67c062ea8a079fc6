# SPDX-License-Identifier: Apache-2.0
"""`export` refuses what TensorRT's parser would refuse, with the node and the rule."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto

from edgellm_ros.builder import exporter
from edgellm_ros.builder.families import qwen3_omni
from edgellm_ros.builder.tensorrt_operators import check_operators, unsupported
from fixtures.graphs import BOOL, FLOAT, INT64, helper, linear_with_cache, make_model

FLOAT16, DOUBLE, UINT8 = TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.UINT8
QKV = {name: (FLOAT16, ["B", 2, size, 8]) for name, size in (("q", "S"), ("k", 16), ("v", 16))}
MASK = {"mask": (BOOL, ["B", 1, "S", 16])}
CACHE = {"cache": (FLOAT16, ["B", 2, 16, 8]), "update": (FLOAT16, ["B", 2, "S", 8]), "index": (INT64, ["B"])}
Y = {"y": (FLOAT16, None)}


def problems(model: onnx.ModelProto) -> list[str]:
    return list(unsupported(ir.from_proto(model).graph))


def one_node(operator, inputs, outputs=("y",), types=None, weights=None, results=None, **attributes):
    node = helper.make_node(operator, list(inputs), list(outputs), name="here", **attributes)
    results = results or {name: (FLOAT16, None) for name in outputs if name}
    return make_model([node], types or {}, results, weights)


def test_exported_graphs_use_supported_operators_only(tiny_lora_engine):
    paths = sorted(tiny_lora_engine.glob("*/model.onnx"))
    assert [path.parent.name for path in paths] == ["action", "audio", "llm", "visual"]
    assert {path.parent.name: list(unsupported(ir.load(path).graph)) for path in paths} == {
        path.parent.name: [] for path in paths
    }


def test_the_graph_for_onnx_runtime_on_cuda_uses_other_operators_too(tiny_engine):
    assert list(unsupported(ir.load(tiny_engine / "llm" / "model.cuda.onnx").graph))


RULES = {
    "an unknown operator": (
        one_node("Unique", ["x"], types={"x": (FLOAT, ["N"])}),
        "Unique 'here': not an operator of the parser's list",
    ),
    "a control flow": (
        one_node("NonZero", ["x"], types={"x": (FLOAT, ["N"])}),
        "NonZero 'here': not an operator",
    ),
    "another domain": (
        one_node("Gelu", ["x"], types={"x": (FLOAT, ["N"])}, domain="com.microsoft"),
        "Gelu 'here': .*domain 'com.microsoft'",
    ),
    "a type of input": (
        one_node("MatMul", ["x", "x"], types={"x": (DOUBLE, ["N", "N"])}),
        "MatMul 'here': data of type DOUBLE, supported are BFLOAT16, FLOAT, FLOAT16",
    ),
    "integers where only floats go": (
        one_node("Softmax", ["x"], types={"x": (INT64, ["N"])}),
        "Softmax 'here': data of type INT64",
    ),
    "bytes between nodes": (
        one_node("Add", ["x", "x"], types={"x": (UINT8, ["N"])}),
        "Add 'here': data of type UINT8",
    ),
    "a type that a node makes": (
        make_model(
            [
                helper.make_node("Less", ["x", "x"], ["less"]),
                helper.make_node("Neg", ["less"], ["y"], name="here"),
            ],
            {"x": (FLOAT, ["N"])},
            Y,
        ),
        "Neg 'here': data of type BOOL",
    ),
    "axes that are computed": (
        one_node("ReduceSum", ["x", "axes"], types={"x": (FLOAT, ["N"]), "axes": (INT64, [1])}),
        "ReduceSum 'here': axes must be a constant",
    ),
    "axes of Unsqueeze": (
        one_node("Unsqueeze", ["x", "axes"], types={"x": (FLOAT, ["N"]), "axes": (INT64, [1])}),
        "Unsqueeze 'here': axes must be a constant",
    ),
    "a large K": (
        one_node(
            "TopK", ["x", "k"], ["y", "i"], {"x": (FLOAT, ["N"])}, weights={"k": np.array([3840])}
        ),
        "TopK 'here': K must be at most 3839, is 3840",
    ),
    "an unsorted TopK": (
        one_node(
            "TopK", ["x", "k"], ["y", "i"], {"x": (FLOAT, ["N"])}, weights={"k": np.array([5])}, sorted=0
        ),
        "TopK 'here': sorted must be 1",
    ),
    "attention of three dimensions": (
        one_node("Attention", "qkv", types={**QKV, "q": (FLOAT16, ["B", "S", 16])}, q_num_heads=2),
        "Attention 'here': Q must have 4 dimensions, has 3",
    ),
    "a mask of two dimensions": (
        one_node("Attention", [*"qkv", "mask"], types={**QKV, "mask": (BOOL, ["S", 16])}),
        "Attention 'here': attn_mask must have 4 dimensions, has 2",
    ),
    "a mask of another type": (
        one_node("Attention", [*"qkv", "mask"], types={**QKV, "mask": (FLOAT, ["B", 1, "S", 16])}),
        "Attention 'here': attn_mask is FLOAT, must be BOOL or of Q's type",
    ),
    "a mask and causal": (
        one_node("Attention", [*"qkv", "mask"], types=QKV | MASK, is_causal=1),
        "Attention 'here': it is causal and has attn_mask",
    ),
    "a past": (
        one_node("Attention", [*"qkv", "", "k", "v"], ["y", "a", "b"], QKV),
        "Attention 'here': input past_key is not supported",
    ),
    "several outputs of attention": (
        one_node("Attention", [*"qkv"], ["y", "a", "b"], QKV),
        "Attention 'here': it has 3 outputs",
    ),
    "lengths in place of a mask": (
        one_node("Attention", [*"qkv", "", "", "", "n"], types=QKV | {"n": (INT64, ["B"])}, is_causal=1),
        "Attention 'here': input nonpad_kv_seqlen is not supported",
    ),
    "softcap": (
        one_node("Attention", "qkv", types=QKV, softcap=30.0),
        "Attention 'here': softcap is not supported",
    ),
    "scores of attention": (
        one_node("Attention", "qkv", types=QKV, qk_matmul_output_mode=1),
        "Attention 'here': qk_matmul_output_mode is not supported",
    ),
    "a cache on another axis": (
        one_node("TensorScatter", CACHE, types=CACHE, axis=1),
        "TensorScatter 'here': axis must be -2, is 1",
    ),
    "a circular cache": (
        one_node("TensorScatter", CACHE, types=CACHE, axis=-2, mode="circular"),
        "TensorScatter 'here': mode must be linear, is circular",
    ),
    "a cache of three dimensions": (
        one_node(
            "TensorScatter",
            CACHE,
            types=CACHE | {"cache": (FLOAT16, ["B", 16, 8]), "update": (FLOAT16, ["B", "S", 8])},
        ),
        "TensorScatter 'here': past_cache must have 4 dimensions, has 3",
    ),
    "a cache of any length": (
        one_node("TensorScatter", CACHE, types=CACHE | {"cache": (FLOAT16, ["B", 2, "C", 8])}),
        "TensorScatter 'here': the cache's capacity must be a number, is C",
    ),
    "a cache that is computed": (
        make_model(
            [
                helper.make_node("Neg", ["cache"], ["negative"]),
                helper.make_node("TensorScatter", ["negative", "update", "index"], ["y"], name="here"),
            ],
            CACHE,
            Y,
        ),
        "TensorScatter 'here': past_cache must be an input of the graph",
    ),
    "positions of 32 bits": (
        one_node(
            "RotaryEmbedding",
            ["q", "c", "c", "p"],
            types=QKV | {"c": (FLOAT16, [9, 4]), "p": (TensorProto.INT32, ["B", "S"])},
        ),
        "RotaryEmbedding 'here': position_ids must be INT64, is INT32",
    ),
    "a reduction while scattering": (
        one_node(
            "ScatterND", "xix", types={"x": (FLOAT, ["N"]), "i": (INT64, ["N", 1])}, reduction="add"
        ),
        "ScatterND 'here': reduction must be none, is add",
    ),
    "statistics of a norm": (
        one_node("LayerNormalization", ["x", "w"], ["y", "mean"], {"x": (FLOAT, ["N"]), "w": (FLOAT, [4])}),
        "LayerNormalization 'here': it has 2 outputs",
    ),
    "indices of pooling": (
        one_node("MaxPool", ["x"], ["y", "i"], {"x": (FLOAT, [1, 1, 8, 8])}, kernel_shape=[2, 2]),
        "MaxPool 'here': it has 2 outputs",
    ),
    "pooling of a line": (
        one_node("AveragePool", ["x"], types={"x": (FLOAT, [1, 1, 8])}, kernel_shape=[2]),
        "AveragePool 'here': only 2D and 3D",
    ),
    "pooling with gaps": (
        one_node("MaxPool", ["x"], types={"x": (FLOAT, [1, 1, 8, 8])}, kernel_shape=[2, 2], dilations=[2, 2]),
        "MaxPool 'here': dilations must be 1",
    ),
    "a text": (
        one_node("Constant", [], value_string="x"),
        "Constant 'here': value_string is not supported",
    ),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_a_graph_that_breaks_a_rule_names_node_and_rule(rule):
    model, message = RULES[rule]
    with pytest.raises(ValueError, match=rf"a graph: TensorRT cannot parse it: .*{message}"):
        check_operators(ir.from_proto(model).graph, "a graph")


def test_a_newer_opset_is_named():
    model = linear_with_cache()
    assert problems(model) == []
    model.opset_import[0].version = 25
    assert problems(model) == ["opset 25: supported are 9 to 24"]


def test_ranks_are_followed_through_reshapes_of_computed_shapes():
    """The builder's form: the batch size of another tensor, then [-1, ...]."""
    model = make_model(
        [
            helper.make_node("Shape", ["n"], ["batch"]),
            helper.make_node("Concat", ["batch", "sizes"], ["shape"], axis=0),
            helper.make_node("Reshape", ["x", "shape"], ["q"]),
            helper.make_node("Attention", ["q", "q", "q"], ["y"]),
        ],
        {"x": (FLOAT, ["N", 8]), "n": (INT64, ["B"])},
        {"y": (FLOAT, None)},
        {"sizes": np.array([2, -1, 8])},
    )
    assert problems(model) == []


def test_export_refuses_a_graph_before_it_writes_anything(tiny_checkpoint, tmp_path, monkeypatch):
    def with_another_node(*arguments, **keywords):
        graph = build_audio(*arguments, **keywords)
        graph.op("NonZero", graph.graph.inputs[0])
        return graph

    build_audio = qwen3_omni.build_audio
    monkeypatch.setattr(qwen3_omni, "build_audio", with_another_node)
    with pytest.raises(ValueError, match=r"audio/model\.onnx: TensorRT cannot parse it: NonZero '/NonZero'"):
        exporter.export(tiny_checkpoint, tmp_path / "engine")
    assert not (tmp_path / "engine").exists()
