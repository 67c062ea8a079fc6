# SPDX-License-Identifier: Apache-2.0
"""RMSNorms of decoders, whose scale is the weight or a constant plus the weight."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.graph.graph import FLOAT
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.model.decoder import RMSNorm


def rms_norm(graph: ModelBuilder, norm: RMSNorm, name: str, x: ir.Value, size: int) -> ir.Value:
    """Add an RMSNorm over the last axis.

    With a shift, norm and scale are computed in fp32.
    """
    if not norm.shift:
        return graph.rms_norm(name, x, size, norm.epsilon)
    with graph.module(name):
        scale = shifted_scale(graph, norm, size)
        y = graph.op("RMSNormalization", graph.to_fp32(x), scale, axis=-1, epsilon=norm.epsilon, stash_type=1)
        return graph.from_fp32(y)


def shifted_scale(graph: ModelBuilder, norm: RMSNorm, size: int) -> ir.Value:
    """Add the scale of the current module, shift + weight, in fp32."""
    full, shift = graph.full_name("weight"), norm.shift
    graph.weights.require(full, (size,))
    read = graph.weights.read
    return graph.weight(full, (size,), lambda: shift + read(full).astype(np.float32), FLOAT)
