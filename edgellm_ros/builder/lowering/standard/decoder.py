# SPDX-License-Identifier: Apache-2.0
"""Graph of a decoder in ONNX's operators: `llm/model.onnx`.

One graph serves prefill, decode and tree verification. The operators are those that both ONNX Runtime and
TensorRT's parser support: 4D Attention with an explicit mask and one output, TensorScatter into a cache of
fixed capacity, RotaryEmbedding with cos and sin rows of each token. The differences between the phases are
inputs: positions, mask, cache rows to write, rows to compute logits of.

Sources of the models: transformers, modeling_llama.py, modeling_qwen2.py, modeling_qwen3.py,
modeling_qwen3_omni_moe.py (Qwen3OmniMoeThinkerTextModel), modeling_qwen3_5.py and modeling_nemotron_h.py.
"""

from __future__ import annotations

import onnx_ir as ir

from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.graph.llm_graph import llm_outputs
from edgellm_ros.builder.lowering.options import LLMOptions
from edgellm_ros.builder.lowering.standard.blocks import StandardBlocks
from edgellm_ros.builder.lowering.standard.recurrent import recurrent_outputs
from edgellm_ros.builder.model.decoder import Decoder, FeedForward
from edgellm_ros.builder.weights.weights import Weights


# inputs_embeds -- layers.0 --(+)-- layers.1 --(+)-- ... -- layers.L-1 -- norm -- lm_head -- logits
#                    |  |      |      |  |      |             |  |   |
#               caches or   deepstack_0     deepstack_1         last_token_ids
#               states of the layer
def build_llm(decoder: Decoder, weights: Weights, options: LLMOptions) -> ModelBuilder:
    """Build `llm/model.onnx`.

    B sequences, S new tokens and N rows of logits of each, C = capacity.

    Inputs, of the precision's type unless said otherwise:
    - inputs_embeds [B,S,H]
    - rope_cos, rope_sin [B,S,R/2] fp32, if a layer has RoPE: one row per token; R values of a head are
      rotated
    - kv_write_index [B] i64: cache row of a sequence's first new token; its last must be below C
    - attention_mask [B,1,S,C] bool: true where a token attends to a cache row; no row may be all false
    - last_token_ids [B,N] i64: the tokens (0..S-1) to compute logits of
    - key_cache_i, value_cache_i [B,Hkv,C,D] of attention layer i
    - deepstack_embeds_i [B,S,H]: added after layer i; zero where there is no image
    - inputs of recurrent layers: see `recurrent_states`
    - LoRA inputs, if `options.lora`: see engine_directory/adapters/lora_inputs.py
    - lm_head.weight [H,V] if the head is an input

    Outputs:
    - logits [B,N,V] fp32
    - present_key_i, present_value_i [B,Hkv,C,D], to be bound to the memory of key_cache_i and value_cache_i
    - outputs of recurrent layers: see `recurrent_outputs`
    - hidden_states_i [B,S,H] for each i of `hidden_state_layers`, as transformers counts them: the output
      of layer i (from 1) before deepstack; of the last layer after the final norm
    - fused_hidden_states [B,S,Hd], if `options.head_states`: of all tokens
    """
    graph = ModelBuilder("llm", weights, options.precision, options.lora, kv_cache=options.kv_cache)
    config, head_states = decoder.config, options.head_states
    hidden, layers = config.hidden_size, config.num_hidden_layers
    blocks = StandardBlocks(graph, decoder, options.capacity, verifies=options.verifies)
    inputs, tokens = blocks.inputs, blocks.inputs.tokens

    def wanted_rows(x: ir.Value) -> ir.Value:
        """Select the tokens whose logits are wanted, x [B,S,H] -> [B,N,H]."""
        return graph.rows(x, inputs.last_token_ids, hidden)

    hidden_states: dict[int, ir.Value] = {}
    layer_inputs: list[ir.Value] = []  # and the last layer's output
    # Whether anything after the last layer needs the rows of all tokens.
    all_rows = layers in options.hidden_state_layers or len(inputs.deepstack) == layers
    all_rows |= head_states is not None and head_states.needs_last(layers)
    # A feed-forward block at the end needs the wanted rows only: saves 7% of a prefill of 130 tokens.
    ends_early = not all_rows and isinstance(decoder.layers[-1][-1].block, FeedForward)
    x = tokens.flatten(inputs.embeds, hidden)
    for i, layer in enumerate(decoder.layers):
        layer_inputs.append(x)
        with graph.module(f"{decoder.prefix}.layers.{i}", nodes=f"layers.{i}"):
            for residual in layer:
                if ends_early and i == layers - 1 and residual is layer[-1]:
                    x = tokens.flatten(wanted_rows(tokens.unflatten(x, hidden)), hidden)
                x = blocks.add(residual, x)
            if i + 1 in options.hidden_state_layers:
                hidden_states[i + 1] = tokens.unflatten(x, hidden)
            if i < len(inputs.deepstack):
                x = graph.op("Add", x, tokens.flatten(inputs.deepstack[i], hidden))
    layer_inputs.append(x)
    x = tokens.unflatten(x, hidden)
    if not (all_rows or ends_early):
        x = wanted_rows(x)
    with graph.module(decoder.prefix, nodes=""):
        hidden_states[layers] = x = blocks.norm(decoder.last_norm, x)
    if all_rows:
        x = wanted_rows(x)
    llm_outputs(
        graph,
        config,
        capacity=options.capacity,
        head=options.head,
        logits=options.head.logits(graph, x),
        presents=blocks.presents,
        hidden_states={i: hidden_states[i] for i in options.hidden_state_layers},
    )
    if config.recurrent is not None:
        recurrent_outputs(graph, config.recurrent, blocks.present_states)
    if head_states is not None:
        head_states.add_output(graph, tokens, layer_inputs, hidden_states[layers])
    return graph
