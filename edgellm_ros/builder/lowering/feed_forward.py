# SPDX-License-Identifier: Apache-2.0
"""Feed-forward blocks, which are the same in every graph."""

from __future__ import annotations

import onnx_ir as ir

from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.model.decoder import FeedForward, SquaredReLU


def feed_forward(graph: ModelBuilder, module: str, block: FeedForward, x: ir.Value, size: int) -> ir.Value:
    """Add a feed-forward block, x [..., size] -> [..., size]."""
    if isinstance(block, SquaredReLU):
        return _squared_relu(graph, module, block, x, size)
    return graph.swiglu(module, x, size, block.inner, block.bias)


# x -- up_proj -- Relu -- square -- down_proj -->
def _squared_relu(graph: ModelBuilder, module: str, block: SquaredReLU, x: ir.Value, size: int) -> ir.Value:
    with graph.module(module):
        x = graph.op("Relu", graph.linear("up_proj", x, size, block.inner, block.bias))
        return graph.linear("down_proj", graph.op("Mul", x, x), block.inner, size, block.bias)
