# SPDX-License-Identifier: Apache-2.0
"""Attention of vision towers, whose projections write rows."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from edgellm_ros.builder.graph.graph import GraphBuilder


# q, k, v -- heads apart -- Attention -- heads together -->
def attend_heads(graph: GraphBuilder, parts: Iterable[ir.Value], heads: int, head_dim: int) -> ir.Value:
    """Add attention between queries, keys and values.

    [N,P,heads * head_dim] each -> the same.
    """
    q, k, v = (graph.transpose(graph.reshape(part, [0, 0, heads, head_dim]), (0, 2, 1, 3)) for part in parts)
    attended = graph.op("Attention", q, k, v, scale=head_dim**-0.5)
    return graph.reshape(graph.transpose(attended, (0, 2, 1, 3)), [0, 0, heads * head_dim])
