# SPDX-License-Identifier: Apache-2.0
"""Layout of tokens between the layers of a language model: [B,S,H] or [B*S,H]."""

from __future__ import annotations

import onnx_ir as ir

from edgellm_ros.builder.graph.graph import GraphBuilder


class TokenLayout:
    """Converts values between the layout of the layers and [B,S,...].

    - batched (`leading` None): layers see [B,S,H].
    - flat: layers see the tokens of all sequences as the rows of one matrix, [B*S,H], as Gemm and ONNX
      Runtime's fused kernels need it.
    """

    def __init__(self, graph: GraphBuilder, leading: ir.Value | None, inferred: tuple[int, ...] = ()) -> None:
        """Make a layout; `leading` None is batched.

        `leading` holds the sizes that `unflatten` begins with: [B,S], or [B] with `inferred` (-1,), which
        leaves S open, so that the same layout serves S tokens and N selected rows of each sequence.
        """
        self._graph = graph
        self._leading = leading
        self._inferred = inferred
        self._shapes: dict[tuple[int, ...], ir.Value] = {}

    def flatten(self, x: ir.Value, size: int) -> ir.Value:
        """Convert [B,S,size] to the layout of the layers."""
        if self._leading is None:
            return x
        with self._graph.scope("tokens"):
            return self._graph.reshape(x, [-1, size])

    def unflatten(self, x: ir.Value, *sizes: int) -> ir.Value:
        """Convert [..., product of sizes] in the layout of the layers to [B,S,*sizes]."""
        graph = self._graph
        if self._leading is None:
            return x if len(sizes) == 1 else graph.reshape(x, [0, 0, *sizes])
        with graph.scope("tokens"):
            if sizes not in self._shapes:
                parts = self._leading, graph.constant([*self._inferred, *sizes])
                self._shapes[sizes] = graph.op("Concat", *parts, axis=0)
            return graph.op("Reshape", x, self._shapes[sizes])

    def split_heads(self, x: ir.Value, count: int, head_dim: int) -> ir.Value:
        """Convert [..., count * head_dim] of the layers to [B,count,S,head_dim]."""
        return self._graph.transpose(self.unflatten(x, count, head_dim), (0, 2, 1, 3))

    def join_heads(self, x: ir.Value, size: int) -> ir.Value:
        """Convert [B,S,heads,D] to the layout of the layers, size = heads * D."""
        return self._graph.reshape(x, [0, 0, size] if self._leading is None else [-1, size])

    def merge_heads(self, x: ir.Value, size: int) -> ir.Value:
        """Convert [B,heads,S,D] to the layout of the layers, size = heads * D."""
        return self.join_heads(self._graph.transpose(x, (0, 2, 1, 3)), size)
