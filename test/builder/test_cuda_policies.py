# SPDX-License-Identifier: Apache-2.0
"""Graphs of policies have what ONNX Runtime's CUDA provider computes.

The provider is not needed: its gaps are those that ONNX Runtime 1.31 has for opset 24.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from edgellm_ros.builder import export
from edgellm_ros.builder.exporter.options import ExportOptions
from edgellm_ros.builder.exporter.plan import plan_export
from edgellm_ros.builder.passes.pools import pool_by_maxima
from fixtures.act_checkpoint import write_act
from fixtures.diffusion_checkpoint import write_diffusion
from fixtures.graphs import FLOAT, helper, make_model
from fixtures.groot_checkpoint import ONE_ROBOT, write_groot
from fixtures.pi_checkpoint import SIZES, WIDER_SIZES, write_pi
from fixtures.smolvla_checkpoint import write_smolvla
from fixtures.xvla_checkpoint import write_xvla

# It has no kernels for these in any precision, or none for bf16 (data of the first input).
MISSING = {"MaxPool", "InstanceNormalization", "Elu"}
MISSING_IN_BF16 = {
    "Clip", "ConvTranspose", "CumSum", "DepthToSpace", "Floor", "GlobalAveragePool", "Log", "Pad",
    "Reciprocal", "ReduceMax", "Resize", "Round",
}  # fmt: skip
WINDOW = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4}
POLICIES = {
    "act": write_act,
    "diffusion": write_diffusion,
    "groot": partial(write_groot, shape=ONE_ROBOT),
    "pi": write_pi,
    "smolvla": write_smolvla,
    "xvla": write_xvla,
}


def pool_model(**attributes):
    nodes = [
        helper.make_node("MaxPool", ["x"], ["pooled"], name="/pool", **attributes),
        helper.make_node("Identity", ["pooled"], ["y"]),
    ]
    shape = ["N", 3, "H", "W"]
    return make_model(nodes, {"x": (FLOAT, shape)}, {"y": (FLOAT, ["N", 3, "h", "w"])})


def run(model, x):
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


@pytest.mark.parametrize("height, width", [(8, 8), (7, 6), (6, 7), (1, 2), (9, 5)])
def test_maxima_are_those_of_the_pooling(height, width):
    standard = pool_model(**WINDOW)
    model = ir.from_proto(standard)
    assert pool_by_maxima(model.graph)
    replaced = ir.to_proto(model)
    onnx.checker.check_model(replaced)
    assert "MaxPool" not in {node.op_type for node in replaced.graph.node}
    x = np.random.default_rng(0).standard_normal((2, 3, height, width)).astype(np.float32)
    np.testing.assert_array_equal(run(replaced, x), run(standard, x))


def test_another_pooling_is_refused():
    model = ir.from_proto(pool_model(**WINDOW | {"strides": [1, 1]}))
    with pytest.raises(ValueError, match=r"/pool: expected windows of 3 x 3, stride 2 and padding 1, found"):
        pool_by_maxima(model.graph)


def test_a_graph_without_poolings_is_unchanged():
    model = ir.from_proto(
        make_model([helper.make_node("Abs", ["x"], ["y"])], {"x": (FLOAT, [1])}, {"y": (FLOAT, [1])})
    )
    assert not pool_by_maxima(model.graph)


def cuda_graphs(graphs):
    """Return the graphs by path that a GPU runs."""
    special = {path: path.replace(".onnx", ".cuda.onnx") for path in graphs if ".cuda." not in path}
    return {path: graph for path, graph in graphs.items() if special.get(path) not in graphs}


def lacking(model: onnx.ModelProto) -> set[str]:
    """Return the operators of a graph that the provider lacks for their types."""
    inferred = onnx.shape_inference.infer_shapes(model).graph
    values = [*inferred.value_info, *inferred.input, *inferred.output]
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    types |= {tensor.name: tensor.data_type for tensor in inferred.initializer}
    assert len(types) > len(inferred.node)
    bf16 = onnx.TensorProto.BFLOAT16
    found = set()
    for node in inferred.node:
        of_bf16 = any(types.get(name) == bf16 for name in node.input[:1])
        gaps = MISSING | (MISSING_IN_BF16 if of_bf16 else set())
        found |= {node.op_type} & gaps
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", POLICIES)
def test_graphs_of_policies_have_no_operator_that_cuda_lacks(tmp_path, name, precision):
    graphs = plan_export(POLICIES[name](tmp_path), ExportOptions(precision=precision)).graphs
    for path, graph in cuda_graphs(graphs).items():
        model = ir.to_proto(ir.Model(graph.graph, ir_version=11))
        assert lacking(model) == set(), path


@pytest.mark.parametrize(
    "write, path",
    [
        (write_pi, "visual/model.onnx"),
        (write_smolvla, "visual/model.onnx"),
        (write_diffusion, "action/model.onnx"),
    ],
)
def test_patches_and_trajectories_need_no_cudnn(tmp_path, write, path):
    graph = plan_export(write(tmp_path), ExportOptions(precision="bf16")).graphs[path]
    assert not {"Conv", "ConvTranspose"} & {node.op_type for node in graph.graph}


def on_cpu(path):
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def inputs_in_advance(engine, session, inputs):
    """Return the inputs of a graph that takes what another one makes of the time."""
    if "modulation" not in {each.name for each in session.get_inputs()}:
        return inputs
    others = dict(inputs)
    (modulation,) = on_cpu(engine / "action/modulation.cuda.onnx").run(None, {"time": others.pop("time")})
    return others | {"modulation": modulation}


@pytest.mark.parametrize(
    "write, parts",
    [(partial(write_pi, sizes=SIZES["pi05"]), ("visual", "action")), (write_smolvla, ("visual",))],
    ids=["pi05", "smolvla"],
)
def test_graphs_for_cuda_compute_the_same_without_transposed_heads(tmp_path, write, parts):
    export(write(tmp_path / "checkpoint"), tmp_path / "engine")
    rng, sizes = np.random.default_rng(0), {"n": 2, "N": 2, "S": 11}
    for part in parts:
        paths = [tmp_path / "engine" / part / name for name in ("model.onnx", "model.cuda.onnx")]
        standard, special = map(on_cpu, paths)
        inputs = {
            each.name: rng.uniform(-1, 1, [sizes.get(size, size) for size in each.shape]).astype(np.float32)
            for each in standard.get_inputs()
        }
        (expected,) = standard.run(None, inputs)
        (found,) = special.run(None, inputs_in_advance(tmp_path / "engine", special, inputs))
        np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
        before, after = (onnx.load(path, load_external_data=False).graph.node for path in paths)
        count = [sum(node.op_type == "Transpose" for node in nodes) for nodes in (before, after)]
        # a patch embedding keeps its own, SmolVLA's blocks of patches theirs
        assert count[1] <= 2 < count[0]


def test_a_layer_of_a_pi05_is_few_operators_in_half_precision(tmp_path):
    graphs = plan_export(
        write_pi(tmp_path, sizes=WIDER_SIZES["pi05"]), ExportOptions(precision="bf16")
    ).graphs
    kinds = {
        part: [node.op_type for node in graphs[f"{part}/model.cuda.onnx"].graph if "/layers.0/" in node.name]
        for part in ("prefix", "action")
    }
    launched = {part: [kind for kind in found if kind != "Constant"] for part, found in kinds.items()}
    assert len(launched["action"]) == 18
    for found in launched.values():
        assert "GroupQueryAttention" in found
        assert not {"Expand", "Concat", "Transpose", "RotaryEmbedding", "Attention"} & set(found)


def test_no_split_has_more_results_than_a_cuda_graph_records(tmp_path):
    checkpoint = write_pi(tmp_path, sizes=replace(SIZES["pi05"], layers=12))  # 75 scales, shifts and gates
    for graph in plan_export(checkpoint, ExportOptions(precision="bf16")).graphs.values():
        assert max(len(node.outputs) for node in graph.graph) <= 32
