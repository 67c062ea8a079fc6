# SPDX-License-Identifier: Apache-2.0
"""Grouped-query attention over a KV cache in ONNX's operators."""

from __future__ import annotations

import onnx_ir as ir

from edgellm_ros.builder.graph.layers import Cache, ModelBuilder
from edgellm_ros.builder.graph.llm_graph import LLMInputs
from edgellm_ros.builder.lowering.heads import attention_module, attention_output, make_heads
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
    config, tokens = decoder.config, inputs.tokens
    mask = inputs.windowed_mask(graph, block.window_in(inputs.capacity))
    with attention_module(graph, module):
        fan_in = block.inputs or config.hidden_size
        projected = graph.linears("qkv_proj", block.widths(config), x, fan_in, block.qkv_bias)
        heads = make_heads(graph, decoder, block, tokens=tokens, projected=projected, rope=inputs.cos_sin)
        attended, present = graph.cached_attention(
            heads.q, heads.k, heads.v, cache, inputs.write_index, mask, scale=config.head_dim**-0.5
        )
        attended = tokens.merge_heads(attended, config.num_attention_heads * config.head_dim)
        return attention_output(graph, decoder, block, attended, heads.gate), present
