# SPDX-License-Identifier: Apache-2.0
"""The last layer, hidden state to logits: for the whole vocabulary or some of it, as a weight or an input."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.architecture import TextArchitecture
from edgellm_ros.builder.checkpoint import Weights
from edgellm_ros.builder.layers import ModelBuilder

LM_HEAD = "lm_head.weight"
EMBEDDING_INPUT = "embedding"


@dataclass(frozen=True)
class LMHead:
    """`vocab_map` [V] keeps only these tokens' rows; None keeps all.

    `as_input`: the graph takes the matrix as its input `lm_head.weight` [H,V], so that it can be exchanged.
    """

    architecture: TextArchitecture
    weights: Weights
    vocab_map: np.ndarray | None = None
    as_input: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """[H, V]: as MatMul takes the matrix."""
        runner = self.architecture.runner
        return runner.hidden_size, runner.output_vocab_size

    def read(self) -> np.ndarray:
        """The matrix [H, V]. Where embeddings are tied it is the embedding table's."""
        matrix = self.weights.read(self._tensor_name())
        return (matrix if self.vocab_map is None else matrix[self.vocab_map]).T

    def logits(self, graph: ModelBuilder, x: ir.Value, share_embedding: bool = False) -> ir.Value:
        """X [B,N,H] to logits [B,N,V] in fp32.

        `share_embedding`: if the matrix is the embedding table, the graph takes it as its input `embedding`
        [V,H] from where the runtime has it.
        """
        runner = self.architecture.runner
        self.weights.require(self._tensor_name(), (runner.vocab_size, runner.hidden_size))
        with graph.scope("lm_head"):
            if self.as_input:
                return graph.to_fp32(_matmul(graph, x, graph.input(LM_HEAD, graph.dtype, self.shape)))
            if share_embedding and self.architecture.tie_word_embeddings and self.vocab_map is None:
                table = graph.input(EMBEDDING_INPUT, graph.dtype, self.shape[::-1])
                return graph.to_fp32(_product_with_table(graph, x, table, self.shape[0]))
            matrix = graph.weight(self._tensor_name(), self.shape, self.read)
            return graph.to_fp32(graph.op("MatMul", x, matrix))

    def _tensor_name(self) -> str:
        return "model.embed_tokens.weight" if self.architecture.tie_word_embeddings else LM_HEAD


# x [B,N,H] -- twice [2,B,N,H] -- MatMul matrix [H,V] -- [2,B,N,V] -- first of two -->
def _matmul(graph: ModelBuilder, x: ir.Value, matrix: ir.Value) -> ir.Value:
    """A product with a matrix that is not a constant.

    A single row would take another way through ONNX Runtime's MatMul than the same row among others and
    differ in the last bits; two or more do not (test_batch_invariance.py). So that an answer does not depend
    on its batch, there are never less than two rows here.
    """
    x = graph.op("Unsqueeze", x, graph.constant([0]))
    product = graph.op("MatMul", graph.op("Concat", x, x, axis=0), matrix)
    return graph.op("Gather", product, graph.constant(0), axis=0)


# x [B,N,H] -- rows [B*N,H] -- Gemm table^T [H,V] -- [B*N,V] -- [B,N,V] -->
def _product_with_table(graph: ModelBuilder, x: ir.Value, table: ir.Value, size: int) -> ir.Value:
    """X [B,N,size] times the transposed table [V,size], without a transposed copy of it."""
    batch = graph.op("Shape", x, start=0, end=2)
    rows = graph.op("Gemm", graph.reshape(x, [-1, size]), table, transB=1)
    return graph.op("Reshape", rows, graph.op("Concat", batch, graph.constant([-1]), axis=0))
