# SPDX-License-Identifier: Apache-2.0
"""Graph of Nemotron-H for ONNX Runtime's CUDA provider."""

from __future__ import annotations

import onnx_ir as ir

from edgellm_ros.builder.checkpoint import Weights
from edgellm_ros.builder.cuda_step import CudaStep
from edgellm_ros.builder.decoder_cuda import fused_attention, outputs, plain_attention, skip_norm
from edgellm_ros.builder.families.nemotron_h.config import HybridArchitecture
from edgellm_ros.builder.families.nemotron_h.text import mlp
from edgellm_ros.builder.graph import FLOAT, INT64
from edgellm_ros.builder.layers import Cache, ModelBuilder
from edgellm_ros.builder.model import LLMOptions
from edgellm_ros.builder.recurrent import Present, recurrent_outputs, recurrent_states
from edgellm_ros.builder.recurrent_cuda import CudaRun, mamba2_cuda_layer
from edgellm_ros.engine_directory import binding_names as names
from edgellm_ros.engine_directory.recurrent_config import ATTENTION, RECURRENT


def build_cuda_llm(architecture: HybridArchitecture, weights: Weights, options: LLMOptions) -> ModelBuilder:
    """Build `llm/model.cuda.onnx`.

    It has the bindings of `build_cuda_decoder` without those of RoPE, and those of `recurrent`.
    """
    graph = ModelBuilder(
        "llm", weights, options.precision, options.lora, onnxruntime=True, kv_cache=options.kv_cache
    )
    runner, hidden, prefix = architecture.runner, architecture.runner.hidden_size, architecture.prefix
    epsilon, layers = architecture.epsilon, architecture.runner.num_hidden_layers
    assert runner.recurrent is not None
    step = CudaStep(graph, runner, options.capacity, rope=False)
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
            return x, graph.rms_norm(name, x, hidden, epsilon)
        with graph.module(name):
            return skip_norm(graph, x, update, graph.tensor("weight", hidden), epsilon)

    x, update = step.tokens.flatten(step.embeds, hidden), None
    for i, kind in enumerate(runner.layer_types):
        with graph.module(f"{prefix}.layers.{i}", nodes=f"layers.{i}"):
            x, normed = add_norm("norm", x, update)
            layer_inputs.append(x)
            with graph.module("mixer"):
                if kind == RECURRENT:
                    state = states[len(present_states)]
                    update, last = mamba2_cuda_layer(graph, architecture.mamba, run, normed, state)
                    present_states.append(last)
                elif kind == ATTENTION:
                    update, present = _attention(step, normed, caches[len(presents)])
                    presents.append(present)
                else:
                    update = mlp(graph, architecture, normed)
            if i + 1 in options.hidden_state_layers and i + 1 < layers:
                x, update = graph.op("Add", x, update), None
                hidden_states[i + 1] = step.tokens.unflatten(x, hidden)
    with graph.module(prefix, nodes=""):
        x, normed = add_norm("norm_f", x, update)
    outputs(step, options, last_token_ids, normed, hidden_states, presents)
    recurrent_outputs(graph, runner.recurrent, present_states)
    if options.fusion is not None:
        options.fusion.add_output(graph, step.tokens, [*layer_inputs, x])
    return graph


def _attention(step: CudaStep, x: ir.Value, cache: Cache) -> tuple[ir.Value, Cache]:
    """Add grouped-query attention over the cache, without positions.

    x [B*S,H] -> [B*S,H].
    """
    graph, runner = step.graph, step.runner
    hidden, size = runner.hidden_size, runner.head_dim
    heads, kv_heads = runner.num_attention_heads, runner.num_key_value_heads
    widths = {"q_proj": heads * size, "k_proj": kv_heads * size, "v_proj": kv_heads * size}
    if graph.dtype == FLOAT:
        projected = graph.linears("qkv_proj", widths, x, hidden)
        q, k, v = (
            step.tokens.split_heads(rows, width // size, size)
            for rows, width in zip(projected, widths.values(), strict=True)
        )
        attended, present = plain_attention(step, q, k, v, cache)
    else:
        joined = graph.joined_linears("qkv_proj", widths, x, hidden)
        joined = step.tokens.unflatten(joined, sum(widths.values()))
        attended, present = fused_attention(step, [joined], cache)
    return graph.linear("o_proj", attended, heads * size, hidden), present
