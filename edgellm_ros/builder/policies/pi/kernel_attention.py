# SPDX-License-Identifier: Apache-2.0
"""Attention of pi0 and pi0.5 as one operator, which ONNX Runtime alone has.

GroupQueryAttention takes queries, keys and values as their product writes them, rotates them, writes keys and
values behind those of a prefix, and attends to all of them both ways.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from edgellm_ros.builder.graph.graph import FLOAT, INT32, ORT_DOMAIN
from edgellm_ros.builder.graph.layers import Cache, ModelBuilder
from edgellm_ros.builder.policies.rope import CosSin
from edgellm_ros.engine_directory.language_model_config import LanguageModelConfig


@dataclass(frozen=True)
class Lengths:
    """Lengths as GroupQueryAttention takes them."""

    last: ir.Value  # [1] i32: the last row, on the device
    total: ir.Value  # [1] i32: the number of rows, on the host


def has_kernel(graph: ModelBuilder, llm: LanguageModelConfig) -> bool:
    """Tell whether CUDA has the kernel, which takes half precision alone."""
    return graph.dtype != FLOAT and llm.head_dim % 16 == 0 and llm.head_dim <= 256


def lengths(graph: ModelBuilder, name: str, rows: ir.Value) -> Lengths:
    """Add the input `name`, which is the last row; rows [1] i64: their number."""
    return Lengths(graph.input(name, INT32, [1]), graph.op("Cast", rows, to=int(INT32)))


# x -- qkv_proj -- GroupQueryAttention -- o_proj -->
#                  (rope, cache)     +--- keys, values
def attend(
    graph: ModelBuilder,
    llm: LanguageModelConfig,
    x: ir.Value,
    hidden: int,
    *,
    table: CosSin,
    rows: Lengths,
    cache: Cache | None = None,
) -> tuple[ir.Value, Cache]:
    """Add attention of the rows x [1,T,hidden] to each other and to a prefix.

    table: cosines and sines of all positions [P,D/2]; cache: keys and values [1,Hkv,C,D] with the prefix,
    whose last T rows are written; None: there is no prefix. Returns the result, and keys and values.
    """
    heads, kv_heads, head_dim = llm.num_attention_heads, llm.num_key_value_heads, llm.head_dim
    widths = {"q_proj": heads * head_dim, "k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim}
    with graph.module("self_attn", nodes="attn"):
        qkv = graph.joined_linears("qkv_proj", widths, x, hidden)
        attended, keys, values = graph.ops(
            "GroupQueryAttention",
            *(qkv, None, None, *(cache or (None, None)), rows.last, rows.total, *table),
            outputs=3,
            domain=ORT_DOMAIN,
            num_heads=heads,
            kv_num_heads=kv_heads,
            scale=head_dim**-0.5,
            do_rotary=1,
            causal=0,
        )
        return graph.linear("o_proj", attended, heads * head_dim, hidden), (keys, values)
