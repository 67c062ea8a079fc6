# SPDX-License-Identifier: Apache-2.0
"""Graph of Qwen3.5's language model for ONNX Runtime's CUDA provider.

In half precision the scales of norms, 1 + weight, are rounded to it: the fused kernels have no other type.
"""

from __future__ import annotations

import onnx_ir as ir

from edgellm_ros.builder.checkpoint import Weights
from edgellm_ros.builder.cuda_step import CudaStep
from edgellm_ros.builder.decoder_cuda import fused_attention, outputs, plain_attention, skip_norm
from edgellm_ros.builder.families.qwen3_5.config import Qwen35Architecture
from edgellm_ros.builder.families.qwen3_5.text import norm_scale
from edgellm_ros.builder.graph import FLOAT, INT64
from edgellm_ros.builder.layers import Cache, ModelBuilder
from edgellm_ros.builder.model import LLMOptions
from edgellm_ros.builder.recurrent import Present, recurrent_outputs, recurrent_states
from edgellm_ros.builder.recurrent_cuda import CudaRun, cut, delta_net_cuda_layer
from edgellm_ros.engine_directory import binding_names as names
from edgellm_ros.engine_directory.recurrent_config import RECURRENT


def build_cuda_llm(architecture: Qwen35Architecture, weights: Weights, options: LLMOptions) -> ModelBuilder:
    """Build `llm/model.cuda.onnx`.

    It has the bindings of `build_cuda_decoder`, and those of `recurrent`.
    """
    graph = ModelBuilder(
        "llm", weights, options.precision, options.lora, onnxruntime=True, kv_cache=options.kv_cache
    )
    runner, hidden, prefix = architecture.runner, architecture.runner.hidden_size, architecture.prefix
    epsilon, inner, layers = architecture.epsilon, architecture.intermediate_size, runner.num_hidden_layers
    assert runner.recurrent is not None
    step = CudaStep(graph, runner, options.capacity)
    last_token_ids = graph.input(names.LAST_TOKEN_IDS, INT64, ["B", "N"])
    shape = runner.num_key_value_heads, options.capacity, runner.head_dim
    caches = graph.caches(range(runner.num_attention_layers), *shape)
    valid_tokens, states = recurrent_states(graph, runner.recurrent)
    run = CudaRun(graph, runner.recurrent, step.tokens, step.embeds, valid_tokens, options.verifies)
    presents: list[Cache] = []
    present_states: list[Present] = []
    hidden_states: dict[int, ir.Value] = {}
    layer_inputs: list[ir.Value] = []  # and the last layer's output

    def add_norm(name: str, x: ir.Value, update: ir.Value | None) -> tuple[ir.Value, ir.Value]:
        if update is None:
            return x, _norm(graph, name, x, hidden, epsilon)
        return skip_norm(graph, x, update, _scale(graph, name, hidden), epsilon)

    x, update = step.tokens.flatten(step.embeds, hidden), None
    for i, kind in enumerate(runner.layer_types):
        with graph.module(f"{prefix}.layers.{i}", nodes=f"layers.{i}"):
            x, normed = add_norm("input_layernorm", x, update)
            layer_inputs.append(x)
            if kind == RECURRENT:
                state = states[len(present_states)]
                with graph.module("linear_attn"):
                    update, last = delta_net_cuda_layer(graph, architecture.net, run, normed, state)
                present_states.append(last)
            else:
                update, present = _attention(step, architecture, normed, caches[len(presents)])
                presents.append(present)
            x, normed = add_norm("post_attention_layernorm", x, update)
            update = graph.swiglu("mlp", normed, hidden, inner)
            if i + 1 in options.hidden_state_layers and i + 1 < layers:
                x, update = graph.op("Add", x, update), None
                hidden_states[i + 1] = step.tokens.unflatten(x, hidden)
    with graph.module(prefix, nodes=""):
        x, normed = add_norm("norm", x, update)
    outputs(step, options, last_token_ids, normed, hidden_states, presents)
    recurrent_outputs(graph, runner.recurrent, present_states)
    if options.fusion is not None:
        options.fusion.add_output(graph, step.tokens, [*layer_inputs, x])
    return graph


# x -- qkv_proj --+-- q --+
#                 +-- k --+-- attention (norms, RoPE, cache) -- Mul -- o_proj -->
#                 +-- v --+                                     |
#                 +-- gate -- Sigmoid --------------------------+
def _attention(
    step: CudaStep, architecture: Qwen35Architecture, x: ir.Value, cache: Cache
) -> tuple[ir.Value, Cache]:
    """Add gated attention over the cache: x [B*S,H] -> [B*S,H]."""
    graph, runner, bias, epsilon = step.graph, step.runner, architecture.attention_bias, architecture.epsilon
    hidden, size, heads = runner.hidden_size, runner.head_dim, runner.num_attention_heads
    kv_heads, width, tokens = runner.num_key_value_heads, heads * size, step.tokens
    with graph.module("self_attn", nodes="attn"):
        widths = {"q_proj": 2 * width, "k_proj": kv_heads * size, "v_proj": kv_heads * size}
        joined = graph.joined_linears("qkv_proj", widths, x, hidden, bias)
        both, k, v = cut(graph, joined, list(widths.values()))
        q, gate = graph.split(tokens.unflatten(both, heads, 2 * size), [size, size], axis=-1)
        if graph.dtype == FLOAT:
            rotary = {"rotary_embedding_dim": runner.rope.rotary_dim} if runner.rope.rotary_dim < size else {}
            q, k, v = graph.transpose(q, 0, 2, 1, 3), *(tokens.split_heads(y, kv_heads, size) for y in (k, v))
            q, k = (
                graph.op(
                    "RotaryEmbedding", _norm(graph, name, y, size, epsilon), *step.rope, **rotary
                )
                for name, y in (("q_norm", q), ("k_norm", k))
            )
            attended, present = plain_attention(step, q, k, v, cache)
        else:
            qkv = [graph.reshape(q, [0, 0, width]), *(tokens.unflatten(y, kv_heads * size) for y in (k, v))]
            norms = [_scale(graph, name, size) for name in ("q_norm", "k_norm")]
            attended, present = fused_attention(step, qkv, cache, norms, epsilon)
        gate = graph.op("Sigmoid", graph.reshape(gate, [-1, width]))
        return graph.linear("o_proj", graph.op("Mul", attended, gate), width, hidden, bias), present


def _norm(graph: ModelBuilder, name: str, x: ir.Value, size: int, epsilon: float) -> ir.Value:
    """Add an RMSNorm over the last axis."""
    scale = _scale(graph, name, size)
    return graph.op("RMSNormalization", x, scale, axis=-1, epsilon=epsilon, stash_type=1)


def _scale(graph: ModelBuilder, name: str, size: int) -> ir.Value:
    """Add the scale of a norm in the graph's type.

    ONNX Runtime rounds it when it loads the graph.
    """
    with graph.module(name):
        return graph.from_fp32(norm_scale(graph, size))
