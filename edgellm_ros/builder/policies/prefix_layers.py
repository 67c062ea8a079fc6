# SPDX-License-Identifier: Apache-2.0
"""Layers that the graphs of policies' prefixes share."""

from __future__ import annotations

import onnx_ir as ir

from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.policies.rope import CosSin
from edgellm_ros.engine_directory.language_model_config import LanguageModelConfig


# x -- qkv_proj --+-- q -- RotaryEmbedding --+
#                 +-- k -- RotaryEmbedding --+-- Attention (mask) -- o_proj -->
#                 +-- v ---------------------+
def attend_rows(
    graph: ModelBuilder,
    llm: LanguageModelConfig,
    x: ir.Value,
    rope: CosSin,
    mask: ir.Value | None,
    only_keys: bool,
) -> tuple[ir.Value | None, ir.Value, ir.Value]:
    """Add attention of the rows of a prefix [1,S,H].

    mask: [1,1,S,S]; None = all rows see all. only_keys: only the keys and values are added. Returns the
    result, None with `only_keys`, and keys and values [1,Hkv,S,D].
    """
    hidden = llm.hidden_size
    heads = {"q_proj": llm.num_attention_heads} if not only_keys else {}
    heads |= {"k_proj": llm.num_key_value_heads, "v_proj": llm.num_key_value_heads}
    with graph.module("self_attn", nodes="attn"):
        widths = {name: count * llm.head_dim for name, count in heads.items()}
        *query, k, v = (
            graph.transpose(graph.reshape(part, [0, 0, count, llm.head_dim]), (0, 2, 1, 3))
            for part, count in zip(
                graph.linears("qkv_proj" if not only_keys else "kv_proj", widths, x, hidden),
                heads.values(),
                strict=True,
            )
        )
        k = graph.op("RotaryEmbedding", k, *rope)
        if only_keys:
            return None, k, v
        q = graph.op("RotaryEmbedding", query[0], *rope)
        masks = () if mask is None else (mask,)
        attended = graph.op("Attention", q, k, v, *masks, scale=llm.head_dim**-0.5)
        width = widths["q_proj"]
        attended = graph.reshape(graph.transpose(attended, (0, 2, 1, 3)), [0, 0, width])
        return graph.linear("o_proj", attended, width, hidden), k, v
