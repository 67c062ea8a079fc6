# SPDX-License-Identifier: Apache-2.0
"""Inferred types and ranks are those of ONNX's own shape inference."""

import onnx
import onnx_ir as ir
import pytest

from fixtures.operator_nodes import NODES, make_graph
from fixtures.tensorrt_rules.operators import SUPPORTED
from fixtures.tensorrt_rules.value_types import Values

pytestmark = pytest.mark.only_on("cpu", reason="nothing here runs on a device")
NOT_INFERRED = {"GroupNormalization"}  # by ONNX


@pytest.mark.parametrize("operator", sorted(NODES.keys() - NOT_INFERRED))
def test_type_and_rank_of_a_result_are_onnx_s_or_unknown(operator):
    kind = sorted(SUPPORTED[operator], key=int)[0]
    model = make_graph(operator, kind)
    names = [name for node in model.graph.node for name in node.output]
    del model.graph.output[:]
    graph = ir.from_proto(model).graph
    values = Values(graph)
    for node in graph:
        values.add(node)
    found = {value.name: value for node in graph for value in node.outputs}
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph.value_info
    expected = {each.name: each.type.tensor_type for each in inferred if each.name in names}
    assert expected
    for name, tensor in expected.items():
        assert values.type(found[name]) in (None, ir.DataType(tensor.elem_type))
        if tensor.HasField("shape"):
            assert values.rank(found[name]) in (None, len(tensor.shape.dim))
