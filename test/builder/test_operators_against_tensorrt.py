# SPDX-License-Identifier: Apache-2.0
"""The rules about operators agree with NVIDIA's own ONNX parser and builder.

To add an operator: a line in SUPPORTED of test/fixtures/tensorrt_rules/operators.py, and one in NODES of
test/fixtures/operator_nodes.py.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from fixtures.accepted_graphs import ACCEPTED
from fixtures.graphs import helper, side_by_side
from fixtures.operator_nodes import NODES, STORED, TYPES, make_graph
from fixtures.real_tensorrt import Refusal, TensorRT
from fixtures.refused_graphs import REFUSED, REFUSED_BY_THE_DOCUMENTATION
from fixtures.tensorrt_rules.operators import CONSTANT_INPUTS, SUPPORTED, unsupported

trt = pytest.importorskip(
    "tensorrt_rtx", reason="TensorRT for RTX has no wheel for this Python or machine (requirements-test.txt)"
)
pytestmark = pytest.mark.only_on("cpu", reason="nothing here runs on a device")
ROOT = Path(__file__).parents[2]
Type = ir.DataType
# Types that this parser and builder take and the documentation of 10.15 does not: DOUBLE is computed as
# FLOAT, INT8 is documented for quantised tensors only.
TAKEN_BEYOND_THE_DOCUMENTATION = {
    Type.DOUBLE: " ".join(name for name, types in SUPPORTED.items() if Type.FLOAT in types),
    Type.INT8: (
        "Abs Add ArgMax ArgMin AveragePool Cast Clip Concat Conv DepthToSpace Div Equal Erf Expand EyeLike "
        "Flatten Gather GatherElements GatherND GlobalMaxPool Greater GreaterOrEqual HardSigmoid HardSwish "
        "Identity LeakyRelu Less LessOrEqual Max MaxPool Min Mul Neg OneHot Pad Reciprocal ReduceL1 "
        "ReduceMax ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape ScatterElements ScatterND "
        "Shape Sign Size Slice Softsign SpaceToDepth Split Squeeze Sub Sum ThresholdedRelu Tile TopK "
        "Transpose Trilu Unsqueeze Where"
    ),
    Type.INT32: "Clip CumSum GlobalAveragePool GlobalMaxPool RMSNormalization",
    Type.INT64: "Clip CumSum GlobalAveragePool GlobalMaxPool RMSNormalization",
    Type.BOOL: "Equal Pad ScatterElements ScatterND",
    Type.UINT8: "Equal Identity Shape Size",
}
# Operators that the parser knows and our graphs do not use.
LEFT_OUT = (
    "BlackmanWindow CastLike CausalConvWithState Dropout GRU GlobalLpPool GridSample "
    "HammingWindow HannWindow If LRN LSTM LinearAttention Loop LpPool MeanVarianceNormalization Mish "
    "NonMaxSuppression NonZero QuantizeLinear RNN RandomNormal RandomNormalLike RandomUniform "
    "RandomUniformLike Resize ReverseSequence RoiAlign STFT Scan Scatter Shrink Swish Upsample"
)


@pytest.fixture(scope="module")
def tensorrt() -> TensorRT:
    return TensorRT(trt)


def problems(model: onnx.ModelProto) -> list[str]:
    return list(unsupported(ir.from_proto(model).graph))


def test_every_supported_operator_has_a_node_here():
    assert NODES.keys() == SUPPORTED.keys()


def test_the_parser_knows_the_supported_operators_and_those_left_out(tensorrt):
    _, parser = tensorrt.parse(make_graph("Add", Type.FLOAT))
    listed = [*SUPPORTED, *LEFT_OUT.split()]
    assert len(listed) == len(set(listed))
    operators = {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""}
    assert {each for each in operators.union(listed) if parser.supports_operator(each)} == set(listed)


@pytest.mark.parametrize("operator", NODES)
def test_the_parser_takes_an_operator_with_each_allowed_type(tensorrt, operator):
    for kind in SUPPORTED[operator]:
        graph = make_graph(operator, kind)
        assert problems(graph) == []
        assert not isinstance(found := tensorrt.parse(graph), Refusal), (kind, found)


@pytest.mark.slow
@pytest.mark.parametrize("operator", NODES)
def test_a_plan_is_built_with_each_allowed_type_and_no_other(tensorrt, operator):
    """One plan has a node of each allowed type: a build takes 20 ms for one node."""
    graphs = {kind: make_graph(operator, kind) for kind in TYPES}
    documented = {kind for kind, graph in graphs.items() if not problems(graph)}
    assert documented == SUPPORTED[operator]
    beyond = {kind for kind, names in TAKEN_BEYOND_THE_DOCUMENTATION.items() if operator in names.split()}
    taken = documented | beyond
    assert tensorrt.refusal(side_by_side({kind.name: graphs[kind] for kind in taken})) is None
    others = graphs.keys() - taken
    assert {kind for kind in others if tensorrt.refusal(graphs[kind]) is not None} == others


@pytest.mark.slow
@pytest.mark.parametrize("operator, index", STORED)
def test_only_an_input_that_must_be_constant_is_refused_if_it_is_not(tensorrt, operator, index):
    graph = make_graph(operator, Type.FLOAT)
    stored = next(each for each in graph.graph.initializer if each.name == f"x{index}")
    values = {stored.name: numpy_helper.to_array(stored)}
    graph.graph.initializer.remove(stored)
    graph.graph.input.append(helper.make_tensor_value_info(stored.name, stored.data_type, stored.dims))
    refusal = tensorrt.refusal(graph, values)
    names = [name for other, place, name in CONSTANT_INPUTS if (other, place) == (operator, index)]
    if names:
        assert problems(graph) == [f"{operator} 'here': {names[0]} must be a constant"]
        assert re.search("(?i)constant", refusal.words)
    else:
        assert (refusal is None) == (problems(graph) == []), refusal


@pytest.mark.parametrize("rule", REFUSED)
def test_a_graph_that_breaks_a_rule_is_refused_with_the_librarys_words(tensorrt, rule):
    model, _, words = REFUSED[rule]
    assert words
    refusal = tensorrt.refusal(model)
    assert refusal is not None
    assert re.search(words, refusal.words), refusal


@pytest.mark.parametrize("rule", REFUSED_BY_THE_DOCUMENTATION)
def test_this_parser_takes_a_graph_that_the_documentation_refuses(tensorrt, rule):
    assert tensorrt.refusal(REFUSED_BY_THE_DOCUMENTATION[rule].model) is None


@pytest.mark.parametrize("graph", ACCEPTED)
def test_a_plan_is_built_of_a_graph_within_the_rules(tensorrt, graph):
    assert tensorrt.refusal(ACCEPTED[graph]) is None


def test_double_precision_becomes_single_precision_without_a_word(tensorrt):
    network, _ = tensorrt.parse(make_graph("Neg", Type.DOUBLE))
    assert network.get_output(0).dtype == trt.DataType.FLOAT


def test_lengths_of_attention_are_ignored_by_this_parser(tensorrt):
    model = REFUSED_BY_THE_DOCUMENTATION["lengths in place of a mask"].model
    network, _ = tensorrt.parse(model)
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    read = {layer.get_input(index).name for layer in layers for index in range(layer.num_inputs)
            if layer.get_input(index) is not None}  # fmt: skip
    assert {"q", "k", "v"} <= read
    assert "n" not in read


@pytest.fixture(scope="module")
def language_model(tiny_engine) -> onnx.ModelProto:
    return onnx.load(tiny_engine / "llm" / "model.onnx")


def first_scatter(model: onnx.ModelProto) -> onnx.NodeProto:
    return next(each for each in model.graph.node if each.op_type == "TensorScatter")


def set_mask_type(model: onnx.ModelProto, kind: ir.DataType) -> None:
    mask = next(each for each in model.graph.input if each.name == "attention_mask")
    mask.type.tensor_type.elem_type = int(kind)


def copy_the_cache(model: onnx.ModelProto) -> None:
    scatter = first_scatter(model)
    model.graph.node.insert(0, helper.make_node("Identity", [scatter.input[0]], ["copy"]))
    scatter.input[0] = "copy"


def copy_the_result(model: onnx.ModelProto) -> None:
    scatter = first_scatter(model)
    copy = helper.make_node("Identity", ["result"], [scatter.output[0]])
    scatter.output[0] = "result"
    model.graph.node.insert(list(model.graph.node).index(scatter) + 1, copy)


def update_twice(model: onnx.ModelProto) -> None:
    again = helper.make_node("TensorScatter", first_scatter(model).input, ["again"])
    model.graph.node.append(again)
    result = next(each for each in model.graph.output if each.name == first_scatter(model).output[0])
    model.graph.output.append(helper.make_tensor_value_info("again", int(Type.FLOAT), None))
    model.graph.output[-1].type.CopyFrom(result.type)


# What is done to the graph of the language model, the words of the rules, who else refuses it, and its words.
MISTAKES = {
    "a mask of integers": (
        lambda model: set_mask_type(model, Type.INT32),
        "Attention '/layers.0/attn/Attention': attn_mask is INT32",
        "parser",
        "Attention: .*/layers.0/attn/Attention.*mask has type Int32 but must have type Float, Half, BFloat16",
    ),
    "a mask of half precision": (
        lambda model: set_mask_type(model, Type.FLOAT16),
        "Attention '/layers.0/attn/Attention': attn_mask is FLOAT16",
        "builder",
        r"element type \(float\) differs from input 1's element type \(half\)",
    ),
    "a cache that is a copy": (
        copy_the_cache,
        "TensorScatter '/layers.0/attn/TensorScatter': past_cache must be an input of the graph",
        "builder",
        "/layers.0/attn/TensorScatter: The cache tensor must be a network input",
    ),
    "a result that is a copy": (
        copy_the_result,
        "TensorScatter '/layers.0/attn/TensorScatter': .* and its result an output",
        "builder",
        "/layers.0/attn/TensorScatter: The output tensor must be a network output",
    ),
    "a cache that is updated twice": (
        update_twice,
        "TensorScatter '/layers.0/attn/TensorScatter': another node updates the same cache",
        "builder",
        "Input index already mapped to an output_index",
    ),
}


@pytest.mark.slow
def test_a_plan_is_built_of_the_language_model(tensorrt, language_model):
    assert tensorrt.refusal(language_model) is None


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_language_model_is_refused_by_both(tensorrt, language_model, mistake):
    make, message, stage, words = MISTAKES[mistake]
    model = onnx.ModelProto()
    model.CopyFrom(language_model)
    make(model)
    assert re.search(message, "; ".join(problems(model)))
    refusal = tensorrt.refusal(model)
    assert refusal is not None
    assert refusal.stage == stage
    assert re.search(words, refusal.words, re.DOTALL), refusal


ATTEND_TO_ITSELF = """
import tensorrt_rtx
from fixtures.graphs import FLOAT, helper, make_model
from fixtures.real_tensorrt import TensorRT

node = helper.make_node("Attention", ["x", "x", "x"], ["y"])
print(TensorRT(tensorrt_rtx).refusal(make_model([node], {"x": (FLOAT, [1, 2, 16, 8])}, {"y": (FLOAT, None)})))
"""


@pytest.mark.slow
def test_an_attention_of_a_tensor_to_itself_crashes_the_builder():
    """So a rule refuses it. When the builder takes it, the rule can go."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "test")))}
    command = [sys.executable, "-c", ATTEND_TO_ITSELF]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGSEGV, done.stdout + done.stderr
