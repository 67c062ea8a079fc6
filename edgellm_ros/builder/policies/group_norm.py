# SPDX-License-Identifier: Apache-2.0
"""Group norm in a policy's graph."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.graph.graph import FLOAT
from edgellm_ros.builder.graph.layers import ModelBuilder

EPSILON = 1e-5  # of GroupNorm in PyTorch


# x -- Reshape [N,groups,-1] -- InstanceNormalization -- Reshape -- Mul (weight) -- Add (bias) -->
def group_norm(
    graph: ModelBuilder, name: str, x: ir.Value, channels: int, groups: int, *, rank: int
) -> ir.Value:
    """Add the group norm `name`: x [N,channels,...] of `rank` dimensions -> the same.

    Computed in fp32. Not GroupNormalization, which ONNX Runtime computes by many nodes.
    """
    column = (channels, *[1] * (rank - 2))
    with graph.module(name):
        scale, shift = (_parameter(graph, part, column) for part in ("weight", "bias"))
        ones, zeros = (graph.constant(np.full(groups, value, np.float32), FLOAT) for value in (1, 0))
        grouped = graph.reshape(graph.to_fp32(x), [0, groups, -1])
        normed = graph.op("InstanceNormalization", grouped, ones, zeros, epsilon=EPSILON)
        normed = graph.from_fp32(graph.op("Reshape", normed, graph.op("Shape", x)))
        return graph.op("Add", graph.op("Mul", normed, scale), shift)


def _parameter(graph: ModelBuilder, part: str, column: tuple[int, ...]) -> ir.Value:
    """Add a value for each channel in the shape [channels,1,...]."""
    weights, full = graph.weights, graph.full_name(part)
    weights.require(full, column[:1])
    return graph.weight(full, column, lambda: weights.read(full).reshape(column))
