# SPDX-License-Identifier: Apache-2.0
"""The rules about operators name the node and the rule that it breaks."""

import re

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from fixtures.accepted_graphs import ACCEPTED
from fixtures.graphs import FLOAT, INT64, helper, linear_with_cache, make_model
from fixtures.refused_graphs import REFUSED, REFUSED_BY_THE_DOCUMENTATION
from fixtures.tensorrt_rules.operators import unsupported

RULES = REFUSED | REFUSED_BY_THE_DOCUMENTATION


def problems(model: onnx.ModelProto) -> list[str]:
    return list(unsupported(ir.from_proto(model).graph))


@pytest.mark.parametrize("rule", RULES)
def test_a_graph_that_breaks_a_rule_names_node_and_rule(rule):
    model, message, _ = RULES[rule]
    assert re.search(message, "; ".join(problems(model)))


@pytest.mark.parametrize("graph", ACCEPTED)
def test_a_graph_within_the_rules_has_no_problem(graph):
    assert problems(ACCEPTED[graph]) == []


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
            helper.make_node("Attention", ["q", "k", "v"], ["y"]),
        ],
        {"x": (FLOAT, ["N", 8]), "n": (INT64, ["B"])} | {name: (FLOAT, ["B", 2, 9, 8]) for name in "kv"},
        {"y": (FLOAT, None)},
        {"sizes": np.array([2, -1, 8])},
    )
    assert problems(model) == []


def test_an_attention_of_a_tensor_to_itself_is_refused():
    """It crashes the builder of TensorRT for RTX: test_operators_against_tensorrt.py."""
    node = helper.make_node("Attention", ["x", "x", "x"], ["y"], name="here")
    model = make_model([node], {"x": (FLOAT, ["B", 2, 16, 8])}, {"y": (FLOAT, None)})
    (problem,) = problems(model)
    assert "Attention 'here': Q and K are the same tensor, which crashes the builder" in problem
