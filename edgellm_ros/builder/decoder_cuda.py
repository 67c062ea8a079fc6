# SPDX-License-Identifier: Apache-2.0
"""Graph of a dense decoder for ONNX Runtime's CUDA provider.

The graph has the same weights as that of `decoder.py` and needs fewer kernels. Beside ONNX's operators it
uses two of ONNX Runtime's own (domain com.microsoft), which TensorRT lacks:

- GroupQueryAttention, in half precision: normalises and rotates queries and keys, writes the new rows into
  the cache and attends to it. The kernel does not support fp32, which uses `Attention` with lengths.
- SkipSimplifiedLayerNormalization: a sum and its RMSNorm in one kernel.

Between the layers the tokens of all sequences are the rows of one matrix [B*S,H].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from edgellm_ros.builder.checkpoint import Weights
from edgellm_ros.builder.cuda_step import CudaStep
from edgellm_ros.builder.decoder import DecoderArchitecture, rotate_heads
from edgellm_ros.builder.graph import FLOAT, INT64
from edgellm_ros.builder.layers import Cache, ModelBuilder
from edgellm_ros.builder.llm_graph import deepstack_inputs, llm_outputs
from edgellm_ros.builder.model import LLMOptions
from edgellm_ros.engine_directory import binding_names as names

ORT_DOMAIN = "com.microsoft"


def build_cuda_decoder(
    architecture: DecoderArchitecture, weights: Weights, options: LLMOptions
) -> ModelBuilder:
    """Build `llm/model.cuda.onnx`.

    It has the inputs and outputs of `build_decoder`, except for these.

    - rope_cos, rope_sin [P,R/2] fp32: a table, P at least C, of which each token takes row position_ids [B,S]
      i64; the tokens of a sequence take rows that follow each other
    - kv_length [B] i64 in place of attention_mask and kv_write_index: filled cache rows once the new tokens
      are written, which are the last of these rows; each token attends up to its own
    - B = 1 if S > 1: several tokens of one sequence, or one token of several
    - embedding [V,H] if the LM head is the embedding table, which the runtime holds on the device

    With `options.fusion` it is `llm/verify.cuda.onnx`, whose tokens may be those of a tree: it also takes
    attention_mask, and position_ids may be any. A token attends to no row behind its own, whatever the mask
    says. With `options.only_chains` too it is `llm/verify.chain.cuda.onnx`, for chains: without a mask it
    runs the faster kernels of the graph without `fusion`.
    """
    graph = ModelBuilder(
        "llm", weights, options.precision, options.lora, onnxruntime=True, kv_cache=options.kv_cache
    )
    runner, epsilon = architecture.runner, architecture.epsilon
    hidden, layers = runner.hidden_size, runner.num_hidden_layers

    fusion = options.fusion
    tree = fusion is not None and not options.only_chains
    step = CudaStep(graph, runner, options.capacity, tree=tree)
    last_token_ids = graph.input(names.LAST_TOKEN_IDS, INT64, ["B", "N"])
    caches = graph.caches(range(layers), runner.num_key_value_heads, options.capacity, runner.head_dim)
    deepstack = deepstack_inputs(graph, runner)

    presents: list[Cache] = []
    hidden_states: dict[int, ir.Value] = {}
    layer_inputs: list[ir.Value] = []  # and the last layer's output
    x, update = step.tokens.flatten(step.embeds, hidden), None
    for i in range(layers):
        with graph.module(f"{architecture.prefix}.layers.{i}", nodes=f"layers.{i}"):
            x, normed = add_norm(graph, "input_layernorm", x, update, hidden, epsilon)
            layer_inputs.append(x)
            window = architecture.window(i, options.capacity)
            attended, present = attention(architecture, step, window, normed, caches[i])
            presents.append(present)
            x, normed = add_norm(graph, "post_attention_layernorm", x, attended, hidden, epsilon)
            inner, bias = architecture.intermediate_size, architecture.mlp_bias
            update = graph.swiglu("mlp", normed, hidden, inner, bias)
            if i + 1 in options.hidden_state_layers and i + 1 < layers:
                x, update = graph.op("Add", x, update), None
                hidden_states[i + 1] = step.tokens.unflatten(x, hidden)
            if i < len(deepstack):
                if update is not None:
                    x = graph.op("Add", x, update)
                update = step.tokens.flatten(deepstack[i], hidden)
    with graph.module(architecture.prefix, nodes=""):
        x, normed = add_norm(graph, "norm", x, update, hidden, epsilon)
    layer_inputs.append(x)
    outputs(step, options, last_token_ids, normed, hidden_states, presents)
    if fusion is not None:
        fusion.add_output(graph, step.tokens, layer_inputs)
    return graph


def outputs(
    step: CudaStep,
    options: LLMOptions,
    last_token_ids: ir.Value,
    normed: ir.Value,
    hidden_states: Mapping[int, ir.Value],
    presents: Sequence[Cache],
) -> None:
    """Add logits, caches and hidden states as outputs.

    normed [B*S,H]: after the last norm; hidden_states [B,S,H]: those asked for of layers before the last.
    """
    graph, runner, layers = step.graph, step.runner, step.runner.num_hidden_layers
    found = {**hidden_states, layers: step.tokens.unflatten(normed, runner.hidden_size)}
    rows = graph.rows(found[layers], last_token_ids, runner.hidden_size)
    logits = options.head.logits(graph, rows, share_embedding=True)
    wanted = {i: found[i] for i in options.hidden_state_layers}
    llm_outputs(graph, runner, options.capacity, options.head, logits, presents, wanted)


def add_norm(
    graph: ModelBuilder, name: str, x: ir.Value, update: ir.Value | None, size: int, epsilon: float
) -> tuple[ir.Value, ir.Value]:
    """Add x + update and its RMSNorm, both [B*S,size]."""
    if update is None:
        return x, graph.rms_norm(name, x, size, epsilon)
    with graph.module(name):
        return skip_norm(graph, x, update, graph.tensor("weight", size), epsilon)


def skip_norm(
    graph: ModelBuilder, x: ir.Value, update: ir.Value, scale: ir.Value, epsilon: float
) -> tuple[ir.Value, ir.Value]:
    """Add x + update and its RMSNorm in one kernel; all of the graph's type."""
    results = graph.ops(
        "SkipSimplifiedLayerNormalization",
        *(x, update, scale),
        outputs=4,
        domain=ORT_DOMAIN,
        epsilon=epsilon,
    )
    return results[3], results[0]


def _head_widths(architecture: DecoderArchitecture) -> dict[str, int]:
    runner = architecture.runner
    keys = runner.num_key_value_heads * runner.head_dim
    return {"q_proj": runner.num_attention_heads * runner.head_dim, "k_proj": keys, "v_proj": keys}


def attention(
    architecture: DecoderArchitecture,
    step: CudaStep,
    window: int | None,
    x: ir.Value,
    cache: Cache,
    fan_in: int | None = None,
) -> tuple[ir.Value, Cache]:
    """Add grouped-query attention over the cache.

    x [B*S,fan_in] -> [B*S,H]; fan_in None = the hidden size. Returns the updated cache too.
    """
    attend = _plain_attention if step.graph.dtype == FLOAT else _fused_attention
    return attend(architecture, step, window, x, cache, fan_in or architecture.runner.hidden_size)


# x -- qkv_proj -- GroupQueryAttention (norms, RoPE, caches, attention) -- o_proj -->
def _fused_attention(
    architecture: DecoderArchitecture,
    step: CudaStep,
    window: int | None,
    x: ir.Value,
    cache: Cache,
    fan_in: int,
) -> tuple[ir.Value, Cache]:
    """Add the attention in half precision."""
    graph, runner = step.graph, architecture.runner
    hidden, head_dim, widths = runner.hidden_size, runner.head_dim, _head_widths(architecture)
    norms: list[ir.Value] = []
    with graph.module("self_attn", nodes="attn"):
        joined = graph.joined_linears("qkv_proj", widths, x, fan_in, architecture.qkv_bias)
        joined = step.tokens.unflatten(joined, sum(widths.values()))
        if architecture.head_norms:
            for name in ("q_norm", "k_norm"):
                with graph.module(name):
                    norms.append(graph.tensor("weight", head_dim))
        attended, present = fused_attention(step, [joined], cache, norms, architecture.epsilon, window)
        bias = architecture.output_bias
        return graph.linear("o_proj", attended, widths["q_proj"], hidden, bias), present


def fused_attention(
    step: CudaStep,
    qkv: Sequence[ir.Value],
    cache: Cache,
    norms: Sequence[ir.Value] = (),
    epsilon: float = 0.0,
    window: int | None = None,
) -> tuple[ir.Value, Cache]:
    """Add attention over the cache in half precision, with RoPE if the step has it.

    qkv: queries, keys and values [B,S,heads*D] each, or one tensor with all three; norms: scales [D] of the
    norms of queries and keys, if there are any. Returns [B*S,heads*D], or [B,S,heads*D] if the step's layout
    is batched, and the updated cache.

    With an FP8 cache, keys and values have one scale of 1, in one tensor, and norms are nodes of their own:
    without either, ONNX Runtime (1.31) has no kernel that reads such a cache as it is, and a decode step
    converts all its rows to half precision.
    """
    graph, runner = step.graph, step.runner
    options: dict[str, Any] = {"do_rotary": int(bool(step.rope))}
    scales: list[ir.Value | None] = [None, None]
    if graph.cache_dtype != graph.dtype:
        qkv, norms = _normed_heads(step, qkv, norms, epsilon), ()
        scales = [graph.constant([1.0], FLOAT)] * 2
        options |= {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8}
    inputs: list[ir.Value | None] = [*qkv, *[None] * (3 - len(qkv)), *cache, step.last_row, step.longest]
    inputs += step.rope or [None] * 3
    inputs.append(None if step.tree is None else step.bias(window))
    inputs += [None, *scales]  # no sinks
    if norms:
        inputs += norms
        options["qk_norm_epsilon"] = epsilon
    while inputs[-1] is None:
        inputs.pop()
    if window is not None and step.tree is None:
        options["local_window_size"] = window
    attended, keys, values = graph.ops(
        "GroupQueryAttention",
        *inputs,
        outputs=3,
        domain=ORT_DOMAIN,
        num_heads=runner.num_attention_heads,
        kv_num_heads=runner.num_key_value_heads,
        scale=runner.head_dim**-0.5,
        **options,
    )
    width = runner.num_attention_heads * runner.head_dim
    return step.tokens.flatten(attended, width), (keys, values)


def _normed_heads(
    step: CudaStep, qkv: Sequence[ir.Value], norms: Sequence[ir.Value], epsilon: float
) -> Sequence[ir.Value]:
    """Add norms of queries and keys; `qkv` and result are as in `fused_attention`."""
    if not norms:
        return qkv
    graph, runner = step.graph, step.runner
    size, heads, kv_heads = runner.head_dim, runner.num_attention_heads, runner.num_key_value_heads
    if len(qkv) == 1:
        qkv = graph.split(qkv[0], [heads * size, kv_heads * size, kv_heads * size], axis=-1)
    normed = []
    for x, count, scale in zip(qkv, (heads, kv_heads), norms, strict=False):
        x = graph.reshape(x, [0, 0, count, size])
        x = graph.op("RMSNormalization", x, scale, axis=-1, epsilon=epsilon, stash_type=1)
        normed.append(graph.reshape(x, [0, 0, count * size]))
    return [*normed, qkv[2]]


# x -- qkv_proj --+-- q -- q_norm -- RotaryEmbedding ---------------------+
#                 +-- k -- k_norm -- RotaryEmbedding -- TensorScatter -- Attention -- o_proj -->
#                 +-- v ------------------------------- TensorScatter -----+
def _plain_attention(
    architecture: DecoderArchitecture,
    step: CudaStep,
    window: int | None,
    x: ir.Value,
    cache: Cache,
    fan_in: int,
) -> tuple[ir.Value, Cache]:
    """Add the attention in fp32, with ONNX's operators."""
    graph, runner = step.graph, architecture.runner
    hidden, head_dim, widths = runner.hidden_size, runner.head_dim, _head_widths(architecture)
    with graph.module("self_attn", nodes="attn"):
        projected = graph.linears("qkv_proj", widths, x, fan_in, architecture.qkv_bias)
        q, k, v = (
            step.tokens.split_heads(rows, width // head_dim, head_dim)
            for rows, width in zip(projected, widths.values(), strict=True)
        )
        q = rotate_heads(graph, architecture, "q_norm", q, *step.rope)
        k = rotate_heads(graph, architecture, "k_norm", k, *step.rope)
        attended, present = plain_attention(step, q, k, v, cache, window)
        bias = architecture.output_bias
        return graph.linear("o_proj", attended, widths["q_proj"], hidden, bias), present


def plain_attention(
    step: CudaStep, q: ir.Value, k: ir.Value, v: ir.Value, cache: Cache, window: int | None = None
) -> tuple[ir.Value, Cache]:
    """Add attention over the cache in fp32; q, k, v [B,heads,S,D], rotated.

    Returns [B*S,heads*D] and the updated cache.
    """
    graph, runner = step.graph, step.runner
    scale = runner.head_dim**-0.5
    keys, present_keys = graph.written_cache(cache[0], k, step.write_index)
    values, present_values = graph.written_cache(cache[1], v, step.write_index)
    if window is None and step.tree is not None:
        attended = graph.op("Attention", q, keys, values, step.tree, scale=scale)
    elif window is None:
        seen = [q, keys, values, None, None, None, step.kv_length]
        attended = graph.op("Attention", *seen, is_causal=1, scale=scale)
    else:
        attended = graph.op("Attention", q, keys, values, step.windowed_mask(window), scale=scale)
    width = runner.num_attention_heads * runner.head_dim
    return step.tokens.merge_heads(attended, width), (present_keys, present_values)
