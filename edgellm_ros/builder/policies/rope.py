# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding inside a policy's graphs.

Positions follow from the lengths of inputs.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.graph.layers import ModelBuilder

ROPE_THETA = 10000.0  # a constant of LeRobot's `apply_rope`, whatever the language model's config says

CosSin = tuple[ir.Value, ir.Value]


def rope_table(graph: ModelBuilder, head_dim: int, positions: int, theta: float = ROPE_THETA) -> CosSin:
    """Add the cosines and sines [positions,D/2] of all positions.

    The table is computed in fp32.
    """
    half = head_dim // 2
    exponents = np.float32(2.0 / head_dim) * np.arange(half, dtype=np.float32)
    scale = np.float32(theta) ** exponents
    angles = np.arange(positions, dtype=np.float32)[:, None] / scale
    return (
        graph.weight("rope.cos", (positions, half), lambda: np.cos(angles)),
        graph.weight("rope.sin", (positions, half), lambda: np.sin(angles)),
    )


def first_rows(graph: ModelBuilder, table: CosSin, count: ir.Value) -> CosSin:
    """Add the rows [1,count,D/2] of the first positions; count [1]."""
    return _rows(graph, table, graph.constant([0]), count, -1)


def rows_from(graph: ModelBuilder, table: CosSin, first: ir.Value, count: int) -> CosSin:
    """Add the rows [1,count,D/2] of positions `first` [1] to first + count - 1."""
    stop = graph.op("Add", first, graph.constant([count]))
    return _rows(graph, table, first, stop, count)


def _rows(graph: ModelBuilder, table: CosSin, start: ir.Value, stop: ir.Value, count: int) -> CosSin:
    """Cut rows out of a table.

    count: a size that TensorRT cannot see in the places, -1 = any.
    """
    assert table[0].shape is not None
    half = table[0].shape.numpy()[1]
    with graph.scope("rope"):
        cut = (graph.op("Slice", each, start, stop, graph.constant([0])) for each in table)
        cos, sin = (graph.reshape(each, [1, count, half]) for each in cut)
        return cos, sin
