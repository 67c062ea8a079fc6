# SPDX-License-Identifier: Apache-2.0
"""Graph of a draft head, which is a decoder.

Its first layer takes a token's embedding and a state side by side.

Sources of the arithmetic: EAGLE (eagle/model/cnets.py) and speculators (models/eagle3/core.py).
"""

from __future__ import annotations

from edgellm_ros.builder.decoder import attention
from edgellm_ros.builder.draft.head import DraftHead
from edgellm_ros.builder.draft.layout import LM_HEAD, MODULE
from edgellm_ros.builder.layers import ModelBuilder
from edgellm_ros.builder.llm_graph import llm_inputs, llm_outputs
from edgellm_ros.builder.lm_head import LMHead
from edgellm_ros.engine_directory import binding_names as names


def draft_lm_head(head: DraftHead, base: LMHead) -> LMHead:
    """Return the LM head of a draft head: its own, or the whole of the base's."""
    runner = head.decoder.runner
    if head.lm_head:
        return LMHead(head.weights, LM_HEAD, runner.vocab_size, runner.hidden_size)
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
      last_token_ids [B,N] i64, key_cache_i, value_cache_i [B,Hkv,C,D]: as of `build_decoder`

    Outputs:
    - logits [B,N,V] fp32: of the head's own vocabulary
    - next_hidden_states [B,S,H]: of all tokens
    - present_key_i, present_value_i [B,Hkv,C,D], to be bound to the memory of key_cache_i and value_cache_i
    """
    graph = ModelBuilder("draft", head.weights, precision)
    decoder, runner = head.decoder, head.decoder.runner
    hidden, epsilon = runner.hidden_size, decoder.epsilon
    inputs = llm_inputs(graph, runner, capacity)
    x = states = graph.input(names.HIDDEN_STATES, graph.dtype, ["B", "S", hidden])

    presents = []
    with graph.module(MODULE, nodes=""):
        for i in range(runner.num_hidden_layers):
            with graph.module(f"layers.{i}"):
                if i == 0:
                    embeds = graph.rms_norm("input_layernorm", inputs.embeds, hidden, epsilon)
                    normed = graph.rms_norm("hidden_norm", states, hidden, epsilon)
                    x = normed if head.norm_before_residual else states
                    normed = graph.op("Concat", embeds, normed, axis=-1)
                else:
                    normed = graph.rms_norm("input_layernorm", x, hidden, epsilon)
                width = hidden if i else 2 * hidden
                attended, present = attention(
                    graph, decoder, inputs, inputs.mask, normed, inputs.caches[i], width
                )
                presents.append(present)
                x = graph.op("Add", x, attended)
                normed = graph.rms_norm("post_attention_layernorm", x, hidden, epsilon)
                inner, bias = decoder.intermediate_size, decoder.mlp_bias
                x = graph.op("Add", x, graph.swiglu("mlp", normed, hidden, inner, bias))
        if head.feeds_back_normed_state:
            x = graph.rms_norm("norm", x, hidden, epsilon)
        last = graph.rows(x, inputs.last_token_ids, hidden)
        if not head.feeds_back_normed_state:
            last = graph.rms_norm("norm", last, hidden, epsilon)
    graph.output(x, names.NEXT_HIDDEN_STATES, graph.dtype, ["B", "S", hidden])
    logits = lm_head.logits(graph, last)
    llm_outputs(graph, runner, capacity, lm_head, logits, presents, {})
    return graph
