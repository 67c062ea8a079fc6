# SPDX-License-Identifier: Apache-2.0
"""Layers of Gemma that prefix and expert share.

The residual stream is fp32 in every precision: its values exceed the range of fp16.

Source of the model: transformers, modeling_gemma.py; LeRobot 0.6.1, policies/pi_gemma.py.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.graph.graph import FLOAT
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.lowering.norms import shifted_scale
from edgellm_ros.builder.policies.pi.architecture import NORM


def norm(graph: ModelBuilder, name: str, x: ir.Value, size: int) -> ir.Value:
    """Add an RMSNorm with the scale 1 + weight; x fp32 -> the graph's type."""
    with graph.module(name):
        return graph.from_fp32(_rms(graph, x, shifted_scale(graph, NORM, size)))


def adaptive_norm(graph: ModelBuilder, name: str, x: ir.Value, scale_shift: tuple[ir.Value, ...]) -> ir.Value:
    """Add an RMSNorm with a scale and a shift that are computed.

    scale_shift: [H] fp32 each. x [n,T,H] fp32 -> the graph's type.
    """
    scale, shift = scale_shift
    with graph.scope(name):
        return graph.from_fp32(graph.op("Add", _rms(graph, x, scale), shift))


def _rms(graph: ModelBuilder, x: ir.Value, scale: ir.Value) -> ir.Value:
    return graph.op("RMSNormalization", x, scale, axis=-1, epsilon=NORM.epsilon, stash_type=1)


# x -- gate_up_proj --+-- gate -- Gelu --+
#                     +-- up ---------- Mul -- down_proj -->
def geglu(graph: ModelBuilder, name: str, x: ir.Value, size: int, inner: int) -> ir.Value:
    """Add the feed-forward block of Gemma, x [..., size] -> [..., size]."""
    with graph.module(name):
        gate, up = graph.linears("gate_up_proj", {"gate_proj": inner, "up_proj": inner}, x, size)
        gate = graph.op("Gelu", gate, approximate="tanh")
        return graph.linear("down_proj", graph.op("Mul", gate, up), inner, size)


def add(graph: ModelBuilder, x: ir.Value, update: ir.Value, gate: ir.Value | None = None) -> ir.Value:
    """Add an update to the residual stream x fp32; gate [H] fp32: its factor."""
    update = graph.to_fp32(update)
    return graph.op("Add", x, update if gate is None else graph.op("Mul", update, gate))


def embedded_words(graph: ModelBuilder, name: str, tokens: ir.Value, vocabulary: int, size: int) -> ir.Value:
    """Add the embeddings [L,size] fp32 of tokens [L].

    As in Gemma, they are multiplied by the square root of the size.
    """
    words = graph.op("Gather", graph.tensor(name, vocabulary, size), tokens, axis=0)
    return graph.op("Mul", graph.to_fp32(words), graph.constant(np.sqrt(np.float32(size)), FLOAT))
