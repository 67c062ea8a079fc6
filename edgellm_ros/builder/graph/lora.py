# SPDX-License-Identifier: Apache-2.0
"""LoRA inputs of a graph: y = x W + (x A) B, with A and B as inputs.

An adapter is used by binding other addresses: no rebuild, no reload, no copy. Without an adapter the rank is
0, and the two products sum over nothing. ONNX Runtime supports empty tensors; TensorRT gets zeros of rank 1
(TensorRTBackend). Layers that read the same x (q, k, v and gate, up) share one pair of inputs
(engine_directory/adapters/lora_inputs.py), so that a decoder layer has 8 more products and not 14.

The bits of a sequence must not depend on the batch around it. ONNX Runtime's MatMul of two activations breaks
that: a single row is computed in another way than several rows, and the numbers of rows and threads decide
how a long sum is cut. Gemm with transposed operands does not: with transA, MLAS has no special case for one
row or column and cuts sums every 128 terms, whatever the shape. So both products have A and t transposed, in
the layouts that these have anyway:

    t = A^T x^T      Gemm(A, x, transA=1, transB=1)      A [K,n r], x [T,K] -> t [n r,T]
    y = x W + t^T B  Gemm(t, B, x W, transA=1)           B [n r,N]          -> y [T,N]

Forms that were compared with ONNX Runtime 1.31 on x86-64, bit by bit, over 13 shapes from [1,1] to [4,320],
1 to 8 threads, K from 48 to 2048 and ranks from 1 to 200 (test/engine/test_batch_invariance.py):

    | form                                               | independent of the batch |
    |----------------------------------------------------|--------------------------|
    | MatMul(MatMul(x, A), B), Add                       | no                       |
    | Gemm(Gemm(x, A), B, x W)                           | no                       |
    | the above, on [B,S,K] with reshapes at each layer  | yes, but slower          |
    | the above, all tokens between the layers as [T,K]  | yes                      |
    | t = Gemm(x^T, A, transA=1), then transposed        | yes, but more nodes      |

docs/lora.md has what LoRA inputs and adapters cost.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from edgellm_ros.builder.graph.graph import GraphBuilder
from edgellm_ros.engine_directory.adapters.lora_inputs import input_name, rank_symbol

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
MAMBA2 = ("in_proj", "out_proj")
DELTA_NET = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
TARGETS = {*ATTENTION, *FEED_FORWARD, *MAMBA2, *DELTA_NET}


# x --+-- MatMul(W) -------------------- y --+
#     |                                      |
#     +-- Gemm(lora_A) -- t -- Gemm(lora_B) -+-->
def add_lora_inputs(
    graph: GraphBuilder, parent: str, parts: Mapping[str, int], x: ir.Value, y: ir.Value, fan_in: int
) -> ir.Value:
    """Add LoRA inputs for linear layers that read the same x.

    The layers are `parts` (name -> fan_out) of the module `parent`. x [T, fan_in] is the input of these
    layers, y [T, sum of fan_outs] their outputs, side by side. Returns y plus the product of x with the
    inputs A [fan_in, n r] and B [n r, sum of fan_outs].
    """
    name, rank = input_name(parent, parts), rank_symbol(len(parts))
    a = graph.input(f"{name}.lora_A.weight", graph.dtype, [fan_in, rank])
    b = graph.input(f"{name}.lora_B.weight", graph.dtype, [rank, sum(parts.values())])
    with graph.scope("lora"):
        t = graph.op("Gemm", a, x, transA=1, transB=1)
        return graph.op("Gemm", t, b, y, transA=1)
