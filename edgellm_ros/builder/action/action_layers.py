# SPDX-License-Identifier: Apache-2.0
"""Layers that the graphs of action heads share; n trajectories of T steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.graph.graph import FLOAT
from edgellm_ros.builder.graph.layers import ModelBuilder


@dataclass(frozen=True)
class StepHeads:
    """Sizes of the attention of steps."""

    hidden_size: int
    steps: int
    heads: int
    kv_heads: int
    head_dim: int
    # Whether operators take rows [n,T,heads*D] as products write them, so that ONNX Runtime's CUDA provider
    # transposes nothing. Needs one head of keys and values.
    rows: bool = False


def repeat(graph: ModelBuilder, x: ir.Value, samples: ir.Value, rank: int) -> ir.Value:
    """Repeat x [1,...] of this rank for all trajectories: [n,...]; samples [1]: n."""
    ones = graph.constant([1] * (rank - 1))
    return graph.op("Expand", x, graph.op("Concat", samples, ones, axis=0))


# time -- Mul 2*pi/period --+-- Sin --+
#                           +-- Cos -- Concat -->
def time_features(graph: ModelBuilder, time: ir.Value, periods: tuple[float, float], size: int) -> ir.Value:
    """Add sines and cosines [T,size] fp32 of time [T].

    periods: the shortest and the longest.
    """
    low, high = periods
    frequency = 2 * math.pi / (low * (high / low) ** np.linspace(0.0, 1.0, size // 2))
    time = graph.op("Unsqueeze", time, graph.constant([-1]))
    angle = graph.op("Mul", time, graph.constant(frequency, FLOAT))
    return graph.op("Concat", graph.op("Sin", angle), graph.op("Cos", angle), axis=-1)


def project_steps(graph: ModelBuilder, x: ir.Value, sizes: StepHeads) -> Sequence[ir.Value]:
    """Add the projection of x [n,T,hidden] to queries, keys and values [n,heads,T,D].

    With `rows` of the sizes they are [n,T,heads*D].
    """
    counts = {"q_proj": sizes.heads, "k_proj": sizes.kv_heads, "v_proj": sizes.kv_heads}
    widths = {name: count * sizes.head_dim for name, count in counts.items()}
    projected = graph.linears("qkv_proj", widths, x, sizes.hidden_size)
    if sizes.rows:
        return projected

    def heads(rows: ir.Value, count: int) -> ir.Value:
        if count == 1:  # ONNX Runtime's CUDA provider copies what it transposes, even so
            return graph.reshape(rows, [0, 1, sizes.steps, sizes.head_dim])
        return graph.transpose(graph.reshape(rows, [0, sizes.steps, count, sizes.head_dim]), (0, 2, 1, 3))

    return [heads(*each) for each in zip(projected, counts.values(), strict=True)]


# q -----------------------+
# k -- Concat (context) ---+-- Attention (visible) -- o_proj -->
# v -- Concat (context) ---+
def attend_with_context(
    graph: ModelBuilder,
    qkv: Sequence[ir.Value],
    context: Sequence[ir.Value],
    visible: Sequence[ir.Value | None],
    sizes: StepHeads,
) -> ir.Value:
    """Add attention of steps to their own keys and to a context's.

    qkv: as `project_steps` returns them; context: keys and values [n,Hkv,P,D]; visible: the inputs of
    Attention behind the values. Returns [n,T,hidden].
    """
    q, *own = qkv
    keys, values = (_join(graph, *pair, sizes) for pair in zip(own, context, strict=True))
    scale, width = sizes.head_dim**-0.5, sizes.heads * sizes.head_dim
    if sizes.rows:
        heads = {"q_num_heads": sizes.heads, "kv_num_heads": sizes.kv_heads}
        attended = graph.op("Attention", q, keys, values, *visible, scale=scale, **heads)
    else:
        attended = graph.op("Attention", q, keys, values, *visible, scale=scale)
        attended = graph.reshape(graph.transpose(attended, (0, 2, 1, 3)), [0, sizes.steps, width])
    return graph.linear("o_proj", attended, width, sizes.hidden_size)


def _join(graph: ModelBuilder, own: ir.Value, context: ir.Value, sizes: StepHeads) -> ir.Value:
    """Concatenate rows [n,Hkv,T,D] and rows [n,Hkv,P,D] to [n,Hkv,T+P,D].

    With `rows` of the sizes the first are [n,T,D], and the result is [n,T+P,D]. Along the last
    axis, because ONNX Runtime's CUDA kernel copies sizes from the host along others.
    """
    flat = (graph.reshape(rows, [0, sizes.kv_heads, -1]) for rows in (own, context))
    shape = [0, -1, sizes.head_dim] if sizes.rows else [0, sizes.kv_heads, -1, sizes.head_dim]
    return graph.reshape(graph.op("Concat", *flat, axis=-1), shape)
