# SPDX-License-Identifier: Apache-2.0
"""Joins rows in the graphs of X-VLA."""

from __future__ import annotations

import onnx_ir as ir

from edgellm_ros.builder.graph.layers import ModelBuilder


def join_rows(graph: ModelBuilder, *parts: ir.Value, width: int) -> ir.Value:
    """Concatenate rows [n,S,width] of each part: [n, sum of S, width].

    Along the last axis, because ONNX Runtime's CUDA kernel copies sizes from the host along others.
    """
    flat = (graph.reshape(part, [0, -1]) for part in parts)
    return graph.reshape(graph.op("Concat", *flat, axis=-1), [0, -1, width])
