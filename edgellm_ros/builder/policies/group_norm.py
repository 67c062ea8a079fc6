# SPDX-License-Identifier: Apache-2.0
"""Group norm in a policy's graph."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.graph.layers import ModelBuilder

EPSILON = 1e-5  # of GroupNorm in PyTorch


# x -- Reshape [N,groups,-1] -- LayerNormalization -- Reshape -- Mul (weight) -- Add (bias) -->
def group_norm(
    graph: ModelBuilder, name: str, x: ir.Value, channels: int, groups: int, sizes: Sequence[int]
) -> ir.Value:
    """Add the group norm `name`: x [N,channels,*sizes] -> the same.

    Mean and variance are computed in fp32. Not InstanceNormalization, which ONNX Runtime's CUDA provider
    lacks in these opsets, nor GroupNormalization, which ONNX Runtime computes by many nodes.
    """
    column, values = (channels, *[1] * len(sizes)), channels // groups * prod(sizes)
    with graph.module(name):
        scale, shift = (_parameter(graph, part, column) for part in ("weight", "bias"))
        one, zero = (graph.constant(np.full(values, value, np.float32), graph.dtype) for value in (1, 0))
        grouped = graph.reshape(x, [0, groups, values])
        normed = graph.op("LayerNormalization", grouped, one, zero, axis=-1, epsilon=EPSILON, stash_type=1)
        normed = graph.reshape(normed, [0, channels, *sizes])
        return graph.op("Add", graph.op("Mul", normed, scale), shift)


def _parameter(graph: ModelBuilder, part: str, column: tuple[int, ...]) -> ir.Value:
    """Add a value for each channel in the shape [channels,1,...]."""
    weights, full = graph.weights, graph.full_name(part)
    weights.require(full, column[:1])
    return graph.weight(full, column, lambda: weights.read(full).reshape(column))
