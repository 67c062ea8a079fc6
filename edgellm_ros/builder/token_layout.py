# SPDX-License-Identifier: Apache-2.0
"""How the tokens of a batch lie between the layers of a language model."""

from __future__ import annotations

import onnx_ir as ir

from edgellm_ros.builder.layers import ModelBuilder


class TokenLayout:
    """[B,S,H]; in a graph with adapters [B*S,H], because Gemm takes matrices."""

    def __init__(self, graph: ModelBuilder, per_sequence: ir.Value) -> None:
        """per_sequence: any value [B]."""
        self._graph = graph
        self._batch = graph.op("Shape", per_sequence) if graph.lora else None
        self._shapes: dict[tuple[int, ...], ir.Value] = {}

    def join(self, x: ir.Value, size: int) -> ir.Value:
        """[B,S,size] as it lies between the layers."""
        if self._batch is None:
            return x
        with self._graph.scope("tokens"):
            return self._graph.reshape(x, [-1, size])

    def part(self, x: ir.Value, size: int) -> ir.Value:
        """As it lies between the layers to [B,S,size]."""
        return x if self._batch is None else self._reshape(x, size)

    def heads(self, x: ir.Value, count: int, head_dim: int) -> ir.Value:
        """As it lies between the layers to [B,count,S,head_dim]."""
        if self._batch is None:
            x = self._graph.reshape(x, [0, 0, count, head_dim])
        else:
            x = self._reshape(x, count, head_dim)
        return self._graph.transpose(x, 0, 2, 1, 3)

    def join_heads(self, x: ir.Value, size: int) -> ir.Value:
        """[B,heads,S,D], size = heads * D, as it lies between the layers."""
        x = self._graph.transpose(x, 0, 2, 1, 3)
        return self._graph.reshape(x, [0, 0, size] if self._batch is None else [-1, size])

    def _reshape(self, x: ir.Value, *sizes: int) -> ir.Value:
        """[B*S, product of sizes] to [B,S,*sizes]."""
        graph = self._graph
        with graph.scope("tokens"):
            if sizes not in self._shapes:
                parts = self._batch, graph.constant([-1, *sizes])
                self._shapes[sizes] = graph.op("Concat", *parts, axis=0)
            return graph.op("Reshape", x, self._shapes[sizes])
