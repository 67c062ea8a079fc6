# SPDX-License-Identifier: Apache-2.0
"""Layers that the graphs of GR00T share.

The layers have the tensors of diffusers' `Attention` and `FeedForward`, and weights that each embodiment has
its own of. Source of the model: LeRobot 0.6.1, policies/groot/action_head/cross_attention_dit.py and
groot_n1_7.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.graph.graph import FLOAT
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.policies.groot.architecture import AttentionSizes, GrootArchitecture

EPSILON = 1e-5  # of every LayerNorm but the last one of the DiT


def split_heads(graph: ModelBuilder, x: ir.Value, sizes: AttentionSizes) -> ir.Value:
    """Convert rows [n,S,width] to heads [n,heads,S,D]."""
    return graph.transpose(graph.reshape(x, [0, -1, sizes.heads, sizes.head_dim]), (0, 2, 1, 3))


def join_heads(graph: ModelBuilder, x: ir.Value, sizes: AttentionSizes) -> ir.Value:
    """Convert heads [n,heads,S,D] to rows [n,S,width]."""
    return graph.reshape(graph.transpose(x, (0, 2, 1, 3)), [0, -1, sizes.width])


# x -- to_q, to_k, to_v -- Attention -- to_out.0 -->
def self_attention(graph: ModelBuilder, x: ir.Value, sizes: AttentionSizes) -> ir.Value:
    """Add attention among all rows [n,S,width] of a sequence."""
    width = sizes.width
    with graph.module("attn1", nodes="attn"):
        parts = dict.fromkeys(("to_q", "to_k", "to_v"), width)
        q, k, v = (split_heads(graph, part, sizes) for part in graph.linears("to_qkv", parts, x, width, True))
        attended = graph.op("Attention", q, k, v, scale=sizes.head_dim**-0.5)
        return graph.linear("to_out.0", join_heads(graph, attended, sizes), width, width, bias=True)


# x -- ff.net.0.proj -- Gelu -- ff.net.2 -->
def feed_forward(graph: ModelBuilder, x: ir.Value, width: int) -> ir.Value:
    """Add the feed-forward block [n,S,width]."""
    raised = graph.linear("ff.net.0.proj", x, width, 4 * width, bias=True)
    raised = graph.op("Gelu", raised, approximate="tanh")
    return graph.linear("ff.net.2", raised, 4 * width, width, bias=True)


def plain_norm(graph: ModelBuilder, x: ir.Value, width: int, epsilon: float = EPSILON) -> ir.Value:
    """Add a LayerNorm over the last axis without weights of its own."""
    ones = graph.constant(np.ones(width), graph.dtype)
    return graph.op("LayerNormalization", x, ones, axis=-1, epsilon=epsilon, stash_type=1)


def embodiment_linears(
    graph: ModelBuilder,
    architecture: GrootArchitecture,
    name: str,
    inputs: Mapping[str, tuple[ir.Value, int]],
    fan_out: int,
) -> ir.Value:
    """Add the linear layer `name` of the embodiment, with several inputs.

    The product of the inputs side by side is a sum of products.

    inputs: name -> (rows [...,fan_in], fan_in), in the order in which the layer takes their values. The last
    one is the first that is added, so it may be one row.
    """
    weights, number, total = graph.weights, architecture.embodiment, sum(size for _, size in inputs.values())
    matrix, bias = graph.full_name(f"{name}.W"), graph.full_name(f"{name}.b")
    weights.require(matrix, (architecture.embodiments, total, fan_out))
    weights.require(bias, (architecture.embodiments, fan_out))

    def rows(first: int, last: int) -> np.ndarray:
        return weights.read(matrix)[number, first:last]

    ends = list(itertools.accumulate(size for _, size in inputs.values()))
    y = graph.weight(bias, (fan_out,), lambda: weights.read(bias)[number])
    with graph.scope(name):
        for (part, (x, size)), end in reversed([*zip(inputs.items(), ends, strict=True)]):
            own = matrix if len(inputs) == 1 else f"{matrix}.{part}"
            weight = graph.weight(own, (size, fan_out), partial(rows, end - size, end))
            y = graph.op("Add", graph.op("MatMul", x, weight), y)
    return y


def embodiment_linear(
    graph: ModelBuilder, architecture: GrootArchitecture, name: str, x: ir.Value, sizes: tuple[int, int]
) -> ir.Value:
    """Add a linear layer of the embodiment, x [...,fan_in] -> [...,fan_out]."""
    return embodiment_linears(graph, architecture, name, {"x": (x, sizes[0])}, sizes[1])


# x -- layer1 -- Relu -- layer2 -->
def embodiment_mlp(
    graph: ModelBuilder,
    architecture: GrootArchitecture,
    name: str,
    x: ir.Value,
    sizes: tuple[int, int, int],
) -> ir.Value:
    """Add two linear layers of the embodiment; sizes: of input, between, of output."""
    with graph.module(name):
        raised = graph.op("Relu", embodiment_linear(graph, architecture, "layer1", x, sizes[:2]))
        return embodiment_linear(graph, architecture, "layer2", raised, sizes[1:])


def sines(graph: ModelBuilder, time: ir.Value, frequencies: np.ndarray) -> tuple[ir.Value, ir.Value]:
    """Add sines and cosines [1,n] fp32 of a time [1] times frequencies [n]."""
    angle = graph.op("Mul", time, graph.constant(frequencies[None].astype(np.float32), FLOAT))
    return graph.op("Sin", angle), graph.op("Cos", angle)
