# SPDX-License-Identifier: Apache-2.0
"""RMSNorms for ONNX Runtime's CUDA provider.

A norm and the sum before it are one kernel. Scales are of the graph's type: the kernels have no other.
"""

from __future__ import annotations

import onnx_ir as ir

from edgellm_ros.builder.graph.graph import ORT_DOMAIN
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.lowering.norms import shifted_scale
from edgellm_ros.builder.model.decoder import RMSNorm


def add_norm(
    graph: ModelBuilder, norm: RMSNorm, name: str, x: ir.Value, update: ir.Value | None, size: int
) -> tuple[ir.Value, ir.Value]:
    """Add x + update and its RMSNorm, both [...,size]; an update of None is zero."""
    scale = norm_scale(graph, norm, name, size)
    with graph.module(name):
        if update is None:
            normed = graph.op("RMSNormalization", x, scale, axis=-1, epsilon=norm.epsilon, stash_type=1)
            return x, normed
        results = graph.ops(
            "SkipSimplifiedLayerNormalization",
            *(x, update, scale),
            outputs=4,
            domain=ORT_DOMAIN,
            epsilon=norm.epsilon,
        )
        return results[3], results[0]


def norm_scale(graph: ModelBuilder, norm: RMSNorm, name: str, size: int) -> ir.Value:
    """Add the scale [size] of a norm in the graph's type; ONNX Runtime rounds it once."""
    with graph.module(name):
        if not norm.shift:
            return graph.tensor("weight", size)
        return graph.from_fp32(shifted_scale(graph, norm, size))
