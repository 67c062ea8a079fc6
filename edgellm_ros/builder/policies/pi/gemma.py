# SPDX-License-Identifier: Apache-2.0
"""Layers of Gemma that prefix and expert share.

The residual stream is fp32 in every precision: its values exceed the range of fp16.

Source of the model: transformers, modeling_gemma.py; LeRobot 0.6.1, policies/pi_gemma.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.graph.graph import FLOAT, ORT_DOMAIN
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.lowering.norms import shifted_scale
from edgellm_ros.builder.policies.pi.architecture import NORM


@dataclass(frozen=True)
class Stream:
    """The residual stream [n,T,H] fp32, and an update that the next norm adds."""

    x: ir.Value
    update: ir.Value | None = None  # None = none
    cuda: bool = False  # whether that sum and the norm are one operator, which ONNX Runtime alone has

    def updated(self, graph: ModelBuilder, update: ir.Value, gate: ir.Value | None = None) -> Stream:
        """Add an update [n,T,H] in the graph's type; gate [H] fp32: its factor."""
        update = graph.to_fp32(update)
        return Stream(self.x, update if gate is None else graph.op("Mul", update, gate), self.cuda)

    def rms(self, graph: ModelBuilder, scale: ir.Value) -> tuple[Stream, ir.Value]:
        """Add the RMSNorm with a scale [H] fp32; return the stream, and the norm fp32."""
        x, epsilon = self.x, NORM.epsilon
        if self.cuda and self.update is not None:
            kind = "SkipSimplifiedLayerNormalization"
            inputs = self.update, x, scale
            normed, *_, x = graph.ops(kind, *inputs, outputs=4, domain=ORT_DOMAIN, epsilon=epsilon)
            return Stream(x, cuda=True), normed
        if self.update is not None:
            x = graph.op("Add", x, self.update)
        normed = graph.op("RMSNormalization", x, scale, axis=-1, epsilon=epsilon, stash_type=1)
        return Stream(x, cuda=self.cuda), normed


def norm(graph: ModelBuilder, name: str, stream: Stream, size: int) -> tuple[Stream, ir.Value]:
    """Add an RMSNorm with the scale 1 + weight.

    Returns the stream, and the norm in the graph's type.
    """
    with graph.module(name):
        stream, normed = stream.rms(graph, shifted_scale(graph, NORM, size))
        return stream, graph.from_fp32(normed)


def adaptive_norm(
    graph: ModelBuilder, name: str, stream: Stream, scale_shift: tuple[ir.Value, ...]
) -> tuple[Stream, ir.Value]:
    """Add an RMSNorm with a scale and a shift that are computed, [H] fp32 each.

    Returns the stream, and the norm in the graph's type.
    """
    scale, shift = scale_shift
    with graph.scope(name):
        stream, normed = stream.rms(graph, scale)
        return stream, graph.from_fp32(graph.op("Add", normed, shift))


# x -- gate_up_proj --+-- gate -- Gelu --+
#                     +-- up ---------- Mul -- down_proj -->
def geglu(graph: ModelBuilder, name: str, x: ir.Value, size: int, inner: int) -> ir.Value:
    """Add the feed-forward block of Gemma, x [..., size] -> [..., size]."""
    with graph.module(name):
        gate, up = graph.linears("gate_up_proj", {"gate_proj": inner, "up_proj": inner}, x, size)
        gate = graph.op("Gelu", gate, approximate="tanh")
        return graph.linear("down_proj", graph.op("Mul", gate, up), inner, size)


def embedded_words(graph: ModelBuilder, name: str, tokens: ir.Value, vocabulary: int, size: int) -> ir.Value:
    """Add the embeddings [L,size] fp32 of tokens [L].

    As in Gemma, they are multiplied by the square root of the size.
    """
    words = graph.op("Gather", graph.tensor(name, vocabulary, size), tokens, axis=0)
    return graph.op("Mul", graph.to_fp32(words), graph.constant(np.sqrt(np.float32(size)), FLOAT))
