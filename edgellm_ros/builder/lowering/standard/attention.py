# SPDX-License-Identifier: Apache-2.0
"""Grouped-query attention over a KV cache in ONNX's operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from edgellm_ros.builder.graph.layers import Cache, ModelBuilder
from edgellm_ros.builder.graph.llm_graph import LLMInputs
from edgellm_ros.builder.graph.token_layout import TokenLayout
from edgellm_ros.builder.lowering.heads import Heads, attention_module, attention_output, make_heads
from edgellm_ros.builder.model.decoder import Attention, Decoder


# x -- qkv_proj -- heads --+-- q ----------------------------------------------+
#                          +-- k -- TensorScatter (key_cache) ---- present_key -- Attention -- o_proj -->
#                          +-- v -- TensorScatter (value_cache) -- present_value --+   |
#                                                                                     mask
def attention(
    graph: ModelBuilder,
    decoder: Decoder,
    module: str,
    block: Attention,
    *,
    inputs: LLMInputs,
    cache: Cache,
    x: ir.Value,
) -> tuple[ir.Value, Cache]:
    """Add an attention block; return its result and the updated cache.

    x and the result are in the layout of the layers.
    """
    mask = inputs.windowed_mask(graph, block.window_in(inputs.capacity))
    presents = []

    def attend(heads: Heads) -> ir.Value:
        attended, present = graph.cached_attention(
            heads.q, heads.k, heads.v, cache, inputs.write_index, mask, scale=decoder.config.head_dim**-0.5
        )
        presents.append(present)
        return attended

    y = _attention(
        graph, decoder, module, block, tokens=inputs.tokens, rope=inputs.cos_sin, x=x, attend=attend
    )
    return y, presents[0]


# x -- qkv_proj -- heads -- Attention (mask) -- o_proj -->
def plain_attention(
    graph: ModelBuilder,
    decoder: Decoder,
    module: str,
    block: Attention,
    *,
    tokens: TokenLayout,
    rope: Sequence[ir.Value],
    mask: ir.Value,
    x: ir.Value,
) -> ir.Value:
    """Add an attention block without a cache.

    The tokens of a run attend to each other.

    rope: cos and sin [B,S,R/2]; mask [B,1,S,S] bool. x and the result are in the layout of the layers.
    """

    def attend(heads: Heads) -> ir.Value:
        scale = decoder.config.head_dim**-0.5
        return graph.op("Attention", heads.q, heads.k, heads.v, mask, scale=scale)

    return _attention(graph, decoder, module, block, tokens=tokens, rope=rope, x=x, attend=attend)


def _attention(
    graph: ModelBuilder,
    decoder: Decoder,
    module: str,
    block: Attention,
    *,
    tokens: TokenLayout,
    rope: Sequence[ir.Value],
    x: ir.Value,
    attend: Callable[[Heads], ir.Value],
) -> ir.Value:
    """Add an attention block.

    attend: adds attention of heads, and returns [B,heads,S,D].
    """
    config = decoder.config
    with attention_module(graph, module):
        fan_in = block.inputs or config.hidden_size
        projected = graph.linears("qkv_proj", block.widths(config), x, fan_in, block.qkv_bias)
        heads = make_heads(graph, decoder, block, tokens=tokens, projected=projected, rope=rope)
        attended = tokens.merge_heads(attend(heads), config.num_attention_heads * config.head_dim)
        return attention_output(graph, decoder, block, attended, heads.gate)
