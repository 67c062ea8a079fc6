# SPDX-License-Identifier: Apache-2.0
"""Places for LoRA adapters in a graph: y = x W + (x A) B, with A and B as inputs of the graph.

An adapter is then nothing but other addresses to bind: no rebuild, no reload, no copy. Without an adapter the
rank is 0, and the two products below have nothing to sum. ONNX Runtime takes empty tensors; TensorRT gets
zeros of rank 1 instead (TensorRTBackend).

Which form of the products? The bits of a sequence must not depend on the batch around it, and ONNX Runtime's
MatMul of two activations breaks that: a single row takes another way than several, and the number of rows and
threads decides how a long sum is cut. Its Gemm with transposed operands does neither: with transA, MLAS has
no special way for one row or column and cuts sums every 128 terms, whatever the shape. So both products are
written with A and t transposed, in the layouts that they have anyway:

    t = A^T x^T      Gemm(A, x, transA=1, transB=1)      A [K,r], x [T,K] -> t [r,T]
    y = x W + t^T B  Gemm(t, B, x W, transA=1)           B [r,N]          -> y [T,N]

What was tried, with ONNX Runtime 1.31 on x86-64: rows compared bit by bit over 13 shapes from [1,1] to
[4,320], 1 to 8 threads, K from 48 to 2048 and ranks from 1 to 200 (test/engine/test_batch_invariance.py holds
the result down), and the time of one decode step of the arena's language model at batch 1 (one thread, its
CPU time) against the same graph without places for adapters:

    | form                                               | independent | rank 0 | rank 8 | rank 16 |
    |----------------------------------------------------|-------------|--------|--------|---------|
    | MatMul(MatMul(x, A), B), Add                       | no          | 1.06   | 1.08   | 1.19    |
    | Gemm(Gemm(x, A), B, x W)                           | no          |        |        |         |
    | the above, on [B,S,K] with reshapes at each layer  | yes         | 1.10   |        |         |
    | the above, all tokens between the layers as [T,K]  | yes         | 1.06   | 1.20   | 1.40    |
    | t = Gemm(x^T, A, transA=1), then transposed        | yes         | 1.09   | 1.24   | 1.31    |

The last has twice as many nodes more, also where there is no adapter. What rank 16 costs is packing and
transposing: the larger the model, the more it drowns in the weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from edgellm_ros.builder.graph import GraphBuilder
from edgellm_ros.engine_directory.lora_inputs import input_name, rank_symbol

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


# x --+-- MatMul(W) -------------------- y --+
#     |                                      |
#     +-- Gemm(lora_A) -- t -- Gemm(lora_B) -+-->
def add_lora_inputs(
    graph: GraphBuilder, parent: str, parts: Mapping[str, int], x: ir.Value, y: ir.Value, fan_in: int
) -> ir.Value:
    """Add LoRA inputs for linear layers that read the same x.

    They are the layers `parts` (name -> fan_out) of the module `parent`. x [T, fan_in] is what these layers
    read, y [T, sum of fan_outs] what they give, side by side. Returns y plus the product of x with the inputs
    A [fan_in, n r] and B [n r, sum of fan_outs].
    """
    name, rank = input_name(parent, parts), rank_symbol(len(parts))
    a = graph.input(f"{name}.lora_A.weight", graph.dtype, [fan_in, rank])
    b = graph.input(f"{name}.lora_B.weight", graph.dtype, [rank, sum(parts.values())])
    with graph.scope("lora"):
        t = graph.op("Gemm", a, x, transA=1, transB=1)
        return graph.op("Gemm", t, b, y, transA=1)
