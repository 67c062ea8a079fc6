# SPDX-License-Identifier: Apache-2.0
"""The LM head: from hidden states to logits.

The head covers the whole vocabulary or a part. Its matrix is a weight, which may be quantised, or an input.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.graph.graph import FLOAT
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.graph.product import quantized_product
from edgellm_ros.builder.quantization.matrix import QuantizedMatrix
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine_directory import binding_names as names

LM_HEAD = "lm_head"  # scope of the nodes, and of a quantised matrix's weights
LM_HEAD_TENSOR = "lm_head.weight"
BLOCK_COLUMNS = 16  # of a matrix in 4 or 8 bits: kernels compute as many at once
ALIGNED_COLUMNS = 8  # of a matrix in 16 bits: then its rows begin at multiples of 16 bytes, as kernels need


def find_lm_head(weights: Weights, embedding: str, tied: bool, tensor: str = LM_HEAD_TENSOR) -> str:
    """Choose the tensor [V,H] of the LM head; the checkpoint's own is `tensor`.

    `tied` is the checkpoint's `tie_word_embeddings`. As in transformers 5, a checkpoint with a matrix of its
    own uses that matrix, whatever `tied` says.
    """
    return embedding if tied and tensor not in weights else tensor


@dataclass(frozen=True)
class LMHead:
    """The LM head of one export."""

    weights: Weights
    tensor: str  # the matrix [vocab_size, hidden_size] in the checkpoint
    vocab_size: int
    hidden_size: int
    is_embedding: bool = False  # whether the matrix is the embedding table
    vocab_map: np.ndarray | None = None  # tokens [V] whose rows are kept; None = all
    as_input: bool = False  # the graph takes the matrix as an input, so that it can be exchanged
    blocks: QuantizedMatrix | None = None  # the matrix [H,V] in 4 or 8 bits; None = as it is

    @property
    def output_vocab_size(self) -> int:
        """Return the number of logits."""
        return self.vocab_size if self.vocab_map is None else len(self.vocab_map)

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape [H,V] of the matrix in MatMul's layout."""
        return self.hidden_size, self.output_vocab_size

    @property
    def is_shared_table(self) -> bool:
        """Whether the matrix is the embedding table that the runtime holds."""
        own = self.blocks is not None or self.as_input or self.vocab_map is not None
        return self.is_embedding and not own

    def read(self) -> np.ndarray:
        """Read the matrix [H,V]."""
        matrix = self.weights.read(self.tensor)
        return (matrix if self.vocab_map is None else matrix[self.vocab_map]).T

    def logits(self, graph: ModelBuilder, x: ir.Value, share_embedding: bool = False) -> ir.Value:
        """Add the LM head: x [B,N,H] to logits [B,N,V] in fp32."""
        return graph.to_fp32(self.product(graph, x, share_embedding))

    def product(self, graph: ModelBuilder, x: ir.Value, share_embedding: bool = False) -> ir.Value:
        """Add the LM head: x [B,N,H] to logits [B,N,V] of the graph's type.

        `share_embedding`: if the matrix is the embedding table, the graph takes the table [V,H] that the
        runtime holds as its input `embedding`.
        """
        self.weights.require(self.tensor, (self.vocab_size, self.hidden_size))
        with graph.scope(LM_HEAD):
            if self.blocks is not None:
                return quantized_product(graph, LM_HEAD, x, self.blocks, graph.onnxruntime)
            if self.as_input:
                matrix = graph.input(names.LM_HEAD, graph.dtype, self.shape)
                return _product_with_input(graph, x, matrix, self.shape[0])
            if share_embedding and self.is_shared_table:
                table = graph.input(names.EMBEDDING, graph.dtype, self.shape[::-1])
                return _product_with_table(graph, x, table, self.shape[0])
            columns = self.output_vocab_size
            if graph.dtype == FLOAT or columns % ALIGNED_COLUMNS == 0:
                return graph.op("MatMul", x, graph.weight(self.tensor, self.shape, self.read))
            return self._padded_product(graph, x)

    # x [B,N,H] -- MatMul [H,V + padding] -- Slice -- [B,N,V] -->
    def _padded_product(self, graph: ModelBuilder, x: ir.Value) -> ir.Value:
        """Add the product with a matrix whose columns are a multiple of ALIGNED_COLUMNS.

        The last column is repeated: zeros would have no scale in a quantised matrix.
        """
        columns = self.output_vocab_size
        padding = -columns % ALIGNED_COLUMNS

        def read() -> np.ndarray:
            return np.pad(self.read(), ((0, 0), (0, padding)), mode="edge")

        matrix = graph.weight(self.tensor, (self.hidden_size, columns + padding), read)
        logits = graph.op("MatMul", x, matrix)
        ends = (graph.constant([each]) for each in (0, columns, 2))
        return graph.op("Slice", logits, *ends)


# x [B,N,H] -- [H,B,N] -- [H,B*N] -- Gemm (transA) matrix [H,V] -- [B*N,V] -- [B,N,V] -->
def _product_with_input(graph: ModelBuilder, x: ir.Value, matrix: ir.Value, size: int) -> ir.Value:
    """Add a product with a matrix that is no constant: x [B,N,size] times [size,V].

    A row's bits must not depend on the rows beside it. ONNX Runtime's MatMul of two activations breaks that,
    its Gemm with transA does not (`lora.py`; test/engine/test_batch_invariance.py). The transposition is of
    three dimensions, because ONNX Runtime would merge one of two into the Gemm.
    """
    batch = graph.op("Shape", x, start=0, end=2)
    columns = graph.reshape(graph.transpose(x, (2, 0, 1)), [size, -1])
    rows = graph.op("Gemm", columns, matrix, transA=1)
    return graph.op("Reshape", rows, graph.op("Concat", batch, graph.constant([-1]), axis=0))


# x [B,N,H] -- rows [B*N,H] -- Gemm table^T [H,V] -- [B*N,V] -- [B,N,V] -->
def _product_with_table(graph: ModelBuilder, x: ir.Value, table: ir.Value, size: int) -> ir.Value:
    """Add a product with the transposed table: x [B,N,size] -> [B,N,V].

    The table [V,size] is not copied.
    """
    batch = graph.op("Shape", x, start=0, end=2)
    rows = graph.op("Gemm", graph.reshape(x, [-1, size]), table, transB=1)
    return graph.op("Reshape", rows, graph.op("Concat", batch, graph.constant([-1]), axis=0))
