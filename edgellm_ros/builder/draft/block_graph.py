# SPDX-License-Identifier: Apache-2.0
"""Graphs of a block drafter: rows of context, and the draft of a block.

Source of the arithmetic: z-lab/dflash (dflash/model.py).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.draft.head import Block, DraftHead
from edgellm_ros.builder.draft.layout import MODULE
from edgellm_ros.builder.graph.fusion import clipped
from edgellm_ros.builder.graph.graph import DTYPES, INT64, Dim
from edgellm_ros.builder.graph.layers import Cache, ModelBuilder
from edgellm_ros.builder.graph.llm_graph import LLMInputs, llm_outputs
from edgellm_ros.builder.graph.lm_head import LMHead
from edgellm_ros.builder.graph.token_layout import TokenLayout
from edgellm_ros.builder.lowering.heads import attention_module, rotate
from edgellm_ros.builder.lowering.standard.blocks import StandardBlocks
from edgellm_ros.builder.model.decoder import Attention
from edgellm_ros.engine_directory import binding_names as names

# `fc` sums large states: in fp16 they are divided by this before, which the norm after it undoes.
FC_SCALE = 64.0


# inputs_embeds -- layers -- last_token_ids -- norm -- lm_head -- logits
#                    |
# visible_rows -- mask, the same for all rows of the block
def build_block(head: DraftHead, lm_head: LMHead, precision: str, capacity: int) -> ModelBuilder:
    """Build `draft/model.onnx` of a block drafter.

    B sequences, S rows of a block, N rows of logits, C = capacity of the drafter's KV cache.

    Inputs, of the precision's type unless said otherwise:
    - inputs_embeds [B,S,H]: of the newest token, and of the mask token
    - rope_cos, rope_sin [B,S,R/2] fp32, kv_write_index [B] i64, last_token_ids [B,N] i64, key_cache_i,
      value_cache_i [B,Hkv,C,D]: as of `build_llm`
    - visible_rows [B] i64: KV rows that each row of the block attends to, the block's included

    Outputs:
    - logits [B,N,V] fp32: of the drafter's tokens
    - present_key_i, present_value_i [B,Hkv,C,D], to be bound to the memory of key_cache_i and value_cache_i
    """
    graph, llm = ModelBuilder("draft", head.weights, precision), head.decoder.config
    blocks = StandardBlocks(graph, head.decoder, capacity, inputs=_block_inputs(graph, head, capacity))
    x = blocks.inputs.embeds
    with graph.module(MODULE, nodes=""):
        for i, residuals in enumerate(head.decoder.layers):
            with graph.module(f"layers.{i}"):
                for residual in residuals:
                    x = blocks.add(residual, x)
        last = blocks.norm("norm", graph.rows(x, blocks.inputs.last_token_ids, llm.hidden_size))
    llm_outputs(
        graph,
        llm,
        capacity=capacity,
        head=lm_head,
        logits=lm_head.logits(graph, last),
        presents=blocks.presents,
        hidden_states={},
    )
    return graph


# hidden_states_i --+                               (of each layer)
# hidden_states_j --+-- Concat -- fc -- hidden_norm --+-- k_proj -- k_norm -- RoPE -- Scatter (key_cache)
# hidden_states_k --+                                 +-- v_proj ------------------- Scatter (value_cache)
def build_context(head: DraftHead, precision: str, capacity: int) -> ModelBuilder:
    """Build `draft/context.onnx`: the KV rows of S tokens that the base has run.

    Inputs, of the precision's type unless said otherwise:
    - hidden_states_i [B,S,H]: outputs of the base, for each i of `base_state_layers`
    - rope_cos, rope_sin [B,S,R/2] fp32, kv_write_index [B] i64, key_cache_i, value_cache_i [B,Hkv,C,D]: as of
      `build_llm`

    Outputs: present_key_i, present_value_i [B,Hkv,C,D], as of `build_block`.
    """
    graph, decoder = ModelBuilder("draft_context", head.weights, precision), head.decoder
    llm, entry = decoder.config, head.entry
    assert isinstance(entry, Block)
    shape: list[Dim] = ["B", "S", llm.hidden_size]
    states = [graph.input(names.hidden_states(i), graph.dtype, shape) for i in entry.state_layers]
    rope = graph.rope_rows("S", llm.rope.rotary_dim // 2)
    write_index = graph.input(names.KV_WRITE_INDEX, INT64, ["B"])
    caches = _caches(graph, head, capacity)
    presents: list[Cache] = []
    with graph.module(MODULE, nodes=""):
        context = _context(graph, head, states)
        for i, (cache, residuals) in enumerate(zip(caches, decoder.layers, strict=True)):
            module, block = next(
                (each.module, each.block) for each in residuals if isinstance(each.block, Attention)
            )
            with graph.module(f"layers.{i}"), attention_module(graph, module):
                rows = graph.linears(
                    "kv_proj",
                    {name: block.widths(llm)[name] for name in ("k_proj", "v_proj")},
                    context,
                    llm.hidden_size,
                    block.qkv_bias,
                )
                tokens = TokenLayout(graph, None)
                k, v = (tokens.split_heads(x, llm.num_key_value_heads, llm.head_dim) for x in rows)
                k = rotate(graph, decoder, block, "k_norm", k, rope)
                new = zip(cache, (k, v), strict=True)
                key, value = (graph.written_cache(slots, x, write_index)[1] for slots, x in new)
                presents.append((key, value))
    present: list[Dim] = ["B", llm.num_key_value_heads, capacity, llm.head_dim]
    for i, (key, value) in enumerate(presents):
        graph.output(key, names.present_key(i), graph.cache_dtype, present)
        graph.output(value, names.present_value(i), graph.cache_dtype, present)
    return graph


def _context(graph: ModelBuilder, head: DraftHead, states: list[ir.Value]) -> ir.Value:
    """Add `fc` and its norm: states [B,S,H] of several layers to one of each token.

    In fp16 `fc` overflows for states of published models (Qwen3's first token). So the states are divided by
    FC_SCALE, and epsilon by its square, which leaves the result as it is.
    """
    size, norm = head.decoder.config.hidden_size, head.decoder.norm
    joined = graph.op("Concat", *states, axis=-1) if len(states) > 1 else states[0]
    epsilon = norm.epsilon
    if graph.dtype == DTYPES["fp16"]:
        joined = graph.op("Mul", joined, graph.constant(1 / FC_SCALE, graph.dtype))
        epsilon /= FC_SCALE**2
    row = clipped(graph, graph.linear("fc", joined, len(states) * size, size))
    return graph.rms_norm("hidden_norm", row, size, epsilon)


def _block_inputs(graph: ModelBuilder, head: DraftHead, capacity: int) -> LLMInputs:
    """Add the inputs of `draft/model.onnx`."""
    llm = head.decoder.config
    embeds = graph.input(names.INPUTS_EMBEDS, graph.dtype, ["B", "S", llm.hidden_size])
    cos_sin = graph.rope_rows("S", llm.rope.rotary_dim // 2)
    write_index = graph.input(names.KV_WRITE_INDEX, INT64, ["B"])
    visible = graph.input(names.VISIBLE_ROWS, INT64, ["B"])
    last_token_ids = graph.input(names.LAST_TOKEN_IDS, INT64, ["B", "N"])
    with graph.scope("mask"):
        ends = graph.reshape(visible, [-1, 1, 1, 1])
        row = graph.op("Less", graph.constant(np.arange(capacity)), ends)  # [B,1,1,C]
        rows = graph.op("Shape", embeds, start=1, end=2)
        one = graph.constant([1])
        mask = graph.op("Expand", row, graph.op("Concat", one, one, rows, one, axis=0))
    return LLMInputs(
        embeds=embeds,
        cos_sin=cos_sin,
        write_index=write_index,
        mask=mask,
        last_token_ids=last_token_ids,
        tokens=TokenLayout(graph, None, inferred=(-1,)),
        caches=_caches(graph, head, capacity),
        deepstack=[],
        capacity=capacity,
    )


def _caches(graph: ModelBuilder, head: DraftHead, capacity: int) -> list[Cache]:
    llm = head.decoder.config
    return graph.caches(range(llm.num_hidden_layers), llm.num_key_value_heads, capacity, llm.head_dim)
