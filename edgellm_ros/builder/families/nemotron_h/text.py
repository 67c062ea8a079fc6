# SPDX-License-Identifier: Apache-2.0
"""Graph of Nemotron-H: each layer is a norm, one mixer, and a residual connection.

Source of the model: transformers, modeling_nemotron_h.py, NemotronHForCausalLM.
"""

from __future__ import annotations

import onnx_ir as ir

from edgellm_ros.builder.checkpoint import Weights
from edgellm_ros.builder.families.nemotron_h.config import HybridArchitecture
from edgellm_ros.builder.layers import Cache, ModelBuilder
from edgellm_ros.builder.llm_graph import LLMInputs, final_logits, llm_inputs, llm_outputs
from edgellm_ros.builder.mamba2 import mamba2_layer
from edgellm_ros.builder.model import LLMOptions
from edgellm_ros.builder.recurrent import Present, recurrent_inputs, recurrent_outputs
from edgellm_ros.engine_directory.recurrent_config import ATTENTION, RECURRENT


# inputs_embeds -- layers.0 -- layers.1 -- ... -- layers.L-1 -- norm_f -- lm_head -- logits
#                     |           |                                         |
#                caches or states of the layer                         last_token_ids
def build_llm(architecture: HybridArchitecture, weights: Weights, options: LLMOptions) -> ModelBuilder:
    """Build `llm/model.onnx`.

    It has the bindings of `build_decoder` without RoPE, and those of `recurrent`.
    """
    graph = ModelBuilder("llm", weights, options.precision, options.lora, kv_cache=options.kv_cache)
    runner, hidden, prefix = architecture.runner, architecture.runner.hidden_size, architecture.prefix
    assert runner.recurrent is not None
    inputs = llm_inputs(graph, runner, options.capacity, rope=False)
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
            normed = graph.rms_norm("norm", x, hidden, architecture.epsilon)
            with graph.module("mixer"):
                if kind == RECURRENT:
                    state = states[len(present_states)]
                    mixed, last = mamba2_layer(graph, architecture.mamba, tokens, chunks, normed, state)
                    present_states.append(last)
                elif kind == ATTENTION:
                    mixed, present = _attention(graph, architecture, inputs, normed, len(presents))
                    presents.append(present)
                else:
                    mixed = mlp(graph, architecture, normed)
            x = graph.op("Add", x, mixed)
            if i + 1 in options.hidden_state_layers:
                hidden_states[i + 1] = tokens.unflatten(x, hidden)

    def norm(x: ir.Value) -> ir.Value:
        with graph.module(prefix, nodes=""):
            return graph.rms_norm("norm_f", x, hidden, architecture.epsilon)

    logits = final_logits(graph, runner, options, inputs, x, norm, hidden_states)
    wanted = {i: hidden_states[i] for i in options.hidden_state_layers}
    llm_outputs(graph, runner, options.capacity, options.head, logits, presents, wanted)
    recurrent_outputs(graph, runner.recurrent, present_states)
    if options.fusion is not None:
        options.fusion.add_output(graph, tokens, [*layer_inputs, x])
    return graph


def _attention(
    graph: ModelBuilder, architecture: HybridArchitecture, inputs: LLMInputs, x: ir.Value, index: int
) -> tuple[ir.Value, Cache]:
    """Add grouped-query attention over cache `index`, without positions."""
    runner = architecture.runner
    hidden, head_dim, heads = runner.hidden_size, runner.head_dim, runner.num_attention_heads
    counts = {"q_proj": heads, "k_proj": runner.num_key_value_heads, "v_proj": runner.num_key_value_heads}
    projected = graph.linears(
        "qkv_proj", {name: count * head_dim for name, count in counts.items()}, x, hidden
    )
    q, k, v = (
        inputs.tokens.split_heads(rows, count, head_dim)
        for rows, count in zip(projected, counts.values(), strict=True)
    )
    where = inputs.caches[index], inputs.write_index, inputs.mask
    attended, present = graph.cached_attention(q, k, v, *where, scale=head_dim**-0.5)
    attended = inputs.tokens.merge_heads(attended, heads * head_dim)
    return graph.linear("o_proj", attended, heads * head_dim, hidden), present


# x -- up_proj -- Relu -- square -- down_proj -->
def mlp(graph: ModelBuilder, architecture: HybridArchitecture, x: ir.Value) -> ir.Value:
    """Add the feed-forward block."""
    hidden, inner, bias = (
        architecture.runner.hidden_size,
        architecture.intermediate_size,
        architecture.mlp_bias,
    )
    x = graph.op("Relu", graph.linear("up_proj", x, hidden, inner, bias))
    return graph.linear("down_proj", graph.op("Mul", x, x), inner, hidden, bias)
