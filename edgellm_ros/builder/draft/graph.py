# SPDX-License-Identifier: Apache-2.0
"""Graph of a draft head: a decoder on pairs of an embedding and a state.

Sources of the arithmetic: EAGLE (eagle/model/cnets.py) and speculators (models/eagle3/core.py); of MTP heads
transformers (modeling_layers.py, MtpModel).
"""

from __future__ import annotations

import onnx_ir as ir

from edgellm_ros.builder.draft.head import DraftHead, JoinedAttention, Projection
from edgellm_ros.builder.draft.layout import LM_HEAD, MODULE
from edgellm_ros.builder.graph.fusion import clipped
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.graph.llm_graph import llm_outputs
from edgellm_ros.builder.graph.lm_head import LMHead
from edgellm_ros.builder.lowering.standard.blocks import StandardBlocks
from edgellm_ros.builder.model.decoder import Residual
from edgellm_ros.engine_directory import binding_names as names


def draft_lm_head(head: DraftHead, base: LMHead) -> LMHead:
    """Return the LM head of a draft head.

    Its own, or the base's rows of the tokens that it drafts.
    """
    llm = head.decoder.config
    if head.lm_head:
        return LMHead(head.weights, LM_HEAD, llm.vocab_size, llm.hidden_size)
    return LMHead(base.weights, base.tensor, base.vocab_size, base.hidden_size, vocab_map=head.token_of_logit)


# EAGLE-3:
# inputs_embeds -- input_layernorm --+
#                                 Concat -- attn --(+)-- post_attention_layernorm -- mlp --(+)--+-- ... --+
# hidden_states --+-- hidden_norm ---+             /                                            |         |
#                 +-------------------------------+   next_hidden_states -----------------------|---------+
#                                                     logits -- lm_head -- norm -- last_token_ids --------+
#
# MTP:
# inputs_embeds -- embedding_norm --+
#                                 Concat -- fc -- layers -- norm --+-- next_hidden_states
# hidden_states --- hidden_norm ----+                              +-- last_token_ids -- lm_head -- logits
def build_draft(head: DraftHead, lm_head: LMHead, precision: str, capacity: int) -> ModelBuilder:
    """Build `draft/model.onnx`.

    B sequences, S tokens and N rows of logits of each, C = capacity of the head's own KV cache.

    Inputs, of the precision's type unless said otherwise:
    - inputs_embeds [B,S,H]: row p is the embedding of the token after the token of position p
    - hidden_states [B,S,H]: the base's state of the token of position p, or next_hidden_states of the run
      that drafted it
    - rope_cos, rope_sin [B,S,R/2] fp32, kv_write_index [B] i64, attention_mask [B,1,S,C] bool,
      last_token_ids [B,N] i64, key_cache_i, value_cache_i [B,Hkv,C,D]: as of `build_llm`

    Outputs:
    - logits [B,N,V] fp32: of the head's own vocabulary
    - next_hidden_states [B,S,H]: of all tokens
    - present_key_i, present_value_i [B,Hkv,C,D], to be bound to the memory of key_cache_i and value_cache_i
    """
    graph = ModelBuilder("draft", head.weights, precision)
    llm = head.decoder.config
    hidden = llm.hidden_size
    blocks = StandardBlocks(graph, head.decoder, capacity)
    states = graph.input(names.HIDDEN_STATES, graph.dtype, ["B", "S", hidden])

    residuals = [(f"layers.{i}", each) for i, layer in enumerate(head.decoder.layers) for each in layer]
    with graph.module(MODULE, nodes=""):
        if isinstance(head.entry, Projection):
            embeds = blocks.norm("embedding_norm", blocks.inputs.embeds)
            normed = blocks.norm("hidden_norm", states)
            x = project(graph, head.entry, embeds, normed, hidden)
        else:
            assert isinstance(head.entry, JoinedAttention)  # blocks have graphs of their own
            module, first = residuals.pop(0)
            with graph.module(module):
                x = _join(graph, blocks, first, states, head.entry)
        for module, residual in residuals:
            with graph.module(module):
                x = blocks.add(residual, x)
        if head.feeds_back_normed_state:
            x = blocks.norm("norm", x)
        last = graph.rows(x, blocks.inputs.last_token_ids, hidden)
        if not head.feeds_back_normed_state:
            last = blocks.norm("norm", last)
    graph.output(x, names.NEXT_HIDDEN_STATES, graph.dtype, ["B", "S", hidden])
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


def project(
    graph: ModelBuilder, entry: Projection, embeds: ir.Value, states: ir.Value, size: int
) -> ir.Value:
    """Make one row of a normed embedding and a normed state, [B,S,size] each."""
    pair = (states, embeds) if entry.state_first else (embeds, states)
    return clipped(graph, graph.linear("fc", graph.op("Concat", *pair, axis=-1), 2 * size, size))


def _join(
    graph: ModelBuilder, blocks: StandardBlocks, first: Residual, states: ir.Value, entry: JoinedAttention
) -> ir.Value:
    """Add the first attention, which takes embedding and state side by side."""
    embeds = blocks.norm(first.norm, blocks.inputs.embeds)
    normed = blocks.norm("hidden_norm", states)
    x = normed if entry.norm_before_residual else states
    return graph.op("Add", x, blocks.block(first, graph.op("Concat", embeds, normed, axis=-1)))
