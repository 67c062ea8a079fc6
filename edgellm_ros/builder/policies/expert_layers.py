# SPDX-License-Identifier: Apache-2.0
"""Layers that the experts of policies share; n chunks of T rows."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from edgellm_ros.builder.action.action_layers import (
    StepHeads,
    attend_with_context,
    project_steps,
    time_features,
)
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.policies.rope import CosSin


# trajectory -- action_in_proj -- MatMul (first half) --(+)-- SiLU -- action_time_mlp_out -->
# time -- sin, cos -------------- MatMul (second half) --+
def embed_actions_and_times(
    graph: ModelBuilder,
    trajectory: ir.Value,
    time: ir.Value,
    periods: tuple[float, float],
    dim: int,
    hidden: int,
) -> ir.Value:
    """Embed actions [n,T,dim] and their times [T] or [1] -> [n,T,hidden].

    The product of the two embeddings side by side is the sum of two products. Angles, sines and cosines are
    fp32 in every precision.
    """
    weights, full = graph.weights, graph.full_name("action_time_mlp_in.weight")

    def half(name: str, start: int) -> ir.Value:
        return graph.weight(name, (hidden, hidden), lambda: weights.read(full)[:, start : start + hidden].T)

    weights.require(full, (hidden, 2 * hidden))
    actions = graph.linear("action_in_proj", graph.from_fp32(trajectory), dim, hidden, bias=True)
    features = time_features(graph, time, periods, hidden)
    times = graph.op("MatMul", graph.from_fp32(features), half(f"{full}.time", hidden))
    times = graph.op("Add", times, graph.tensor("action_time_mlp_in.bias", hidden))
    raised = graph.op("Add", graph.op("MatMul", actions, half(f"{full}.actions", 0)), times)
    return graph.linear("action_time_mlp_out", silu(graph, raised), hidden, hidden, bias=True)


def silu(graph: ModelBuilder, x: ir.Value) -> ir.Value:
    """Add x * sigmoid(x)."""
    return graph.op("Mul", x, graph.op("Sigmoid", x))


# x -- qkv_proj --+-- q -- RotaryEmbedding ------------+
#                 +-- k -- RotaryEmbedding -- Concat --+-- Attention (visible) -- o_proj -->
#                 +-- v --------------------- Concat --+
def attend_rows_and_context(
    graph: ModelBuilder,
    x: ir.Value,
    sizes: StepHeads,
    *,
    rope: CosSin,
    context: Sequence[ir.Value],
    visible: Sequence[ir.Value],
    samples: ir.Value,
) -> ir.Value:
    """Add attention of rows [n,T,hidden] to each other and to a prefix.

    rope: [1,T,D/2] each; context: keys and values [n,Hkv,S,D]; visible: the inputs of Attention behind the
    values; samples [1]: n.
    """
    with graph.module("self_attn", nodes="attn"):
        q, k, v = project_steps(graph, x, sizes)
        size = graph.op("Concat", samples, graph.constant([1, 1]), axis=0)
        cos_sin = [graph.op("Expand", each, size) for each in rope]
        if sizes.rows:
            q = graph.op("RotaryEmbedding", q, *cos_sin, num_heads=sizes.heads)
            k = graph.op("RotaryEmbedding", k, *cos_sin, num_heads=sizes.kv_heads)
        else:
            q, k = (graph.op("RotaryEmbedding", each, *cos_sin) for each in (q, k))
        return attend_with_context(graph, (q, k, v), context, visible, sizes)
