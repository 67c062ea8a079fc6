# SPDX-License-Identifier: Apache-2.0
"""Graph of a draft head, which is a decoder.

The first layer takes a token's embedding and a state side by side.

Sources of the arithmetic: EAGLE (eagle/model/cnets.py) and speculators (models/eagle3/core.py).
"""

from __future__ import annotations

from edgellm_ros.builder.draft.head import DraftHead
from edgellm_ros.builder.draft.layout import LM_HEAD, MODULE
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.graph.llm_graph import llm_outputs
from edgellm_ros.builder.graph.lm_head import LMHead
from edgellm_ros.builder.lowering.standard.blocks import StandardBlocks
from edgellm_ros.engine_directory import binding_names as names


def draft_lm_head(head: DraftHead, base: LMHead) -> LMHead:
    """Return the LM head of a draft head: its own, or the whole of the base's."""
    llm = head.decoder.config
    if head.lm_head:
        return LMHead(head.weights, LM_HEAD, llm.vocab_size, llm.hidden_size)
    return LMHead(base.weights, base.tensor, base.vocab_size, base.hidden_size)


# inputs_embeds -- input_layernorm --+
#                                 Concat -- attn --(+)-- post_attention_layernorm -- mlp --(+)--+-- ... --+
# hidden_states --+-- hidden_norm ---+             /                                            |         |
#                 +-------------------------------+   next_hidden_states -----------------------|---------+
#                                                     logits -- lm_head -- norm -- last_token_ids --------+
def build_draft(head: DraftHead, lm_head: LMHead, precision: str, capacity: int) -> ModelBuilder:
    """Build `draft/model.onnx`.

    B sequences, S tokens and N rows of logits of each, C = capacity of the head's own KV cache.

    Inputs, of the precision's type unless said otherwise:
    - inputs_embeds [B,S,H]: row p is the embedding of the token after the token of position p
    - hidden_states [B,S,H]: the fused state of the token of position p, or next_hidden_states of the run
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

    (first, *rest), *later = head.decoder.layers
    with graph.module(MODULE, nodes=""):
        with graph.module("layers.0"):
            embeds = blocks.norm(first.norm, blocks.inputs.embeds)
            normed = blocks.norm("hidden_norm", states)
            x = normed if head.norm_before_residual else states
            joined = graph.op("Concat", embeds, normed, axis=-1)
            x = graph.op("Add", x, blocks.block(first, joined))
            for residual in rest:
                x = blocks.add(residual, x)
        for i, layer in enumerate(later, 1):
            with graph.module(f"layers.{i}"):
                for residual in layer:
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
