# SPDX-License-Identifier: Apache-2.0
"""Graph of Qwen3.5's language model.

Source of the model: transformers, modeling_qwen3_5.py, Qwen3_5ForCausalLM.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.checkpoint import Weights
from edgellm_ros.builder.delta_net import delta_net_layer
from edgellm_ros.builder.families.qwen3_5.config import Qwen35Architecture
from edgellm_ros.builder.graph import FLOAT
from edgellm_ros.builder.layers import Cache, ModelBuilder
from edgellm_ros.builder.llm_graph import LLMInputs, final_logits, llm_inputs, llm_outputs
from edgellm_ros.builder.model import LLMOptions
from edgellm_ros.builder.recurrent import Present, recurrent_inputs, recurrent_outputs
from edgellm_ros.engine_directory.recurrent_config import RECURRENT


# inputs_embeds -- layers.0 -- layers.1 -- ... -- layers.L-1 -- norm -- lm_head -- logits
#                     |           |                                       |
#                caches or states of the layer                       last_token_ids
def build_llm(architecture: Qwen35Architecture, weights: Weights, options: LLMOptions) -> ModelBuilder:
    """Build `llm/model.onnx`.

    It has the inputs and outputs of `build_decoder`, and those of `recurrent`.
    """
    graph = ModelBuilder("llm", weights, options.precision, options.lora, kv_cache=options.kv_cache)
    runner, hidden, prefix = architecture.runner, architecture.runner.hidden_size, architecture.prefix
    epsilon, inner = architecture.epsilon, architecture.intermediate_size
    assert runner.recurrent is not None
    inputs = llm_inputs(graph, runner, options.capacity)
    chunks, states = recurrent_inputs(graph, runner.recurrent, inputs.embeds, options.verifies)
    tokens = inputs.tokens
    presents: list[Cache] = []
    present_states: list[Present] = []
    hidden_states: dict[int, ir.Value] = {}
    layer_inputs: list[ir.Value] = []  # and the last layer's output
    x = tokens.flatten(inputs.embeds, hidden)
    for i, kind in enumerate(runner.layer_types):
        layer_inputs.append(x)
        with graph.module(f"{prefix}.layers.{i}", nodes=f"layers.{i}"):
            normed = _norm(graph, "input_layernorm", x, hidden, epsilon)
            if kind == RECURRENT:
                state = states[len(present_states)]
                with graph.module("linear_attn"):
                    mixed, last = delta_net_layer(
                        graph, architecture.net, tokens, chunks, normed, state, options.capacity
                    )
                present_states.append(last)
            else:
                mixed, present = _attention(graph, architecture, inputs, normed, inputs.caches[len(presents)])
                presents.append(present)
            x = graph.op("Add", x, mixed)
            normed = _norm(graph, "post_attention_layernorm", x, hidden, epsilon)
            x = graph.op("Add", x, graph.swiglu("mlp", normed, hidden, inner))
            if i + 1 in options.hidden_state_layers:
                hidden_states[i + 1] = tokens.unflatten(x, hidden)

    def norm(x: ir.Value) -> ir.Value:
        with graph.module(prefix, nodes=""):
            return _norm(graph, "norm", x, hidden, epsilon)

    logits = final_logits(graph, runner, options, inputs, x, norm, hidden_states)
    wanted = {i: hidden_states[i] for i in options.hidden_state_layers}
    llm_outputs(graph, runner, options.capacity, options.head, logits, presents, wanted)
    recurrent_outputs(graph, runner.recurrent, present_states)
    if options.fusion is not None:
        options.fusion.add_output(graph, tokens, [*layer_inputs, x])
    return graph


# x -- qkv_proj --+-- q -- q_norm -- RotaryEmbedding --+
#                 +-- k -- k_norm -- RotaryEmbedding --+-- Attention --+
#                 +-- v -------------------------------+               |
#                 +-- gate -- Sigmoid ------------------------------- Mul -- o_proj -->
def _attention(
    graph: ModelBuilder, architecture: Qwen35Architecture, inputs: LLMInputs, x: ir.Value, cache: Cache
) -> tuple[ir.Value, Cache]:
    """Add gated attention over the cache.

    q_proj has the query and the gate of each head side by side.
    """
    runner, bias, tokens = architecture.runner, architecture.attention_bias, inputs.tokens
    hidden, size, heads = runner.hidden_size, runner.head_dim, runner.num_attention_heads
    kv_heads, width = runner.num_key_value_heads, runner.num_attention_heads * runner.head_dim
    rotary = {"rotary_embedding_dim": runner.rope.rotary_dim} if runner.rope.rotary_dim < size else {}
    with graph.module("self_attn", nodes="attn"):
        widths = {"q_proj": 2 * width, "k_proj": kv_heads * size, "v_proj": kv_heads * size}
        both, k, v = graph.linears("qkv_proj", widths, x, hidden, bias)
        q, gate = graph.split(tokens.unflatten(both, heads, 2 * size), [size, size], axis=-1)
        gate = tokens.flatten(graph.reshape(gate, [0, 0, width]), width)
        k, v = (tokens.split_heads(rows, kv_heads, size) for rows in (k, v))
        q = _norm(graph, "q_norm", graph.transpose(q, 0, 2, 1, 3), size, architecture.epsilon)
        k = _norm(graph, "k_norm", k, size, architecture.epsilon)
        q, k = (graph.op("RotaryEmbedding", rows, *inputs.cos_sin, **rotary) for rows in (q, k))
        attended, present = graph.cached_attention(
            q, k, v, cache, inputs.write_index, inputs.mask, scale=size**-0.5
        )
        attended = tokens.merge_heads(attended, width)
        attended = graph.op("Mul", attended, graph.op("Sigmoid", gate))
        return graph.linear("o_proj", attended, width, hidden, bias), present


def _norm(graph: ModelBuilder, name: str, x: ir.Value, size: int, epsilon: float) -> ir.Value:
    """Add an RMSNorm whose scale is 1 + weight; norm and scale are computed in fp32."""
    with graph.module(name):
        scale = norm_scale(graph, size)
        y = graph.op("RMSNormalization", graph.to_fp32(x), scale, axis=-1, epsilon=epsilon, stash_type=1)
        return graph.from_fp32(y)


def norm_scale(graph: ModelBuilder, size: int) -> ir.Value:
    """Add the scale of the current module, an RMSNorm: 1 + weight, in fp32."""
    full = graph.full_name("weight")
    graph.weights.require(full, (size,))
    read = graph.weights.read
    return graph.weight(full, (size,), lambda: 1 + read(full).astype(np.float32), FLOAT)
