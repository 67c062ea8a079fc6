# SPDX-License-Identifier: Apache-2.0
"""Grouped-query attention over a KV cache for ONNX Runtime alone.

GroupQueryAttention normalises and rotates queries and keys, writes the new rows into the cache and attends to
it. The kernel for CUDA does not support fp32, which uses `Attention` with lengths there. The kernel for a CPU
lacks the norms, which are nodes of their own.

On a CPU the numbers of GroupQueryAttention depend on the other sequences of a run, and on the number of
tokens of a prompt (129 and 130 tokens, ONNX Runtime 1.31): engines whose bits do not depend on the batch do
not have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from edgellm_ros.builder.graph.graph import FLOAT, ORT_DOMAIN
from edgellm_ros.builder.graph.layers import Cache
from edgellm_ros.builder.lowering.heads import attention_module, attention_output, make_heads, split_gate
from edgellm_ros.builder.lowering.onnxruntime.norms import norm_scale
from edgellm_ros.builder.lowering.onnxruntime.step import OnnxRuntimeStep
from edgellm_ros.builder.model.decoder import Attention, Decoder


# CUDA in fp32:   x -- qkv_proj -- heads -- cache, Attention --------------------------+-- gate -- o_proj -->
# otherwise:      x -- qkv_proj -- GroupQueryAttention (norms, RoPE, cache, attention) --+
def attention(
    step: OnnxRuntimeStep, decoder: Decoder, module: str, block: Attention, *, cache: Cache, x: ir.Value
) -> tuple[ir.Value, Cache]:
    """Add an attention block; return its result and the updated cache.

    x and the result are in the layout of the layers.
    """
    graph, config, window = step.graph, decoder.config, block.window_in(step.capacity)
    widths, fan_in = block.widths(config), block.inputs or config.hidden_size
    with attention_module(graph, module):
        joined = graph.joined_linears("qkv_proj", widths, x, fan_in, block.qkv_bias)
        if not step.has_kernel:
            projected = graph.split(joined, list(widths.values()), axis=-1)
            heads = make_heads(graph, decoder, block, tokens=step.tokens, projected=projected, rope=step.rope)
            attended, present = _plain_attention(step, heads.q, heads.k, heads.v, cache, window)
            gate = heads.gate
        else:
            qkv, gate = _rows(step, decoder, block, joined)
            names = ("q_norm", "k_norm") if block.head_norms else ()
            norms = [norm_scale(graph, decoder.norm, name, config.head_dim) for name in names]
            epsilon = decoder.norm.epsilon
            attended, present = _fused_attention(
                step, qkv, cache, norms=norms, epsilon=epsilon, window=window
            )
        return attention_output(graph, decoder, block, attended, gate), present


def _rows(
    step: OnnxRuntimeStep, decoder: Decoder, block: Attention, joined: ir.Value
) -> tuple[Sequence[ir.Value], ir.Value | None]:
    """Return queries, keys and values as `_fused_attention` takes them, and the gate."""
    widths, tokens = block.widths(decoder.config), step.tokens
    if not block.gated:
        return [tokens.unflatten(joined, sum(widths.values()))], None
    both, k, v = step.graph.split(joined, list(widths.values()), axis=-1)
    q, gate = split_gate(step.graph, decoder, block, tokens, both)
    q = step.graph.reshape(q, [0, 0, widths["q_proj"] // 2])
    return [q, *(tokens.unflatten(rows, widths["k_proj"]) for rows in (k, v))], gate


def _fused_attention(
    step: OnnxRuntimeStep,
    qkv: Sequence[ir.Value],
    cache: Cache,
    *,
    norms: Sequence[ir.Value],
    epsilon: float,
    window: int | None,
) -> tuple[ir.Value, Cache]:
    """Add attention over the cache in one kernel, with RoPE if the step has it.

    qkv: queries, keys and values [B,S,heads*D] each, or one tensor with all three; norms: scales [D] of the
    norms of queries and keys, if there are any. Returns [B*S,heads*D], or [B,S,heads*D] if the step's layout
    is batched, and the updated cache.

    With an FP8 cache and on a CPU, norms are nodes of their own. With an FP8 cache, one tensor is the scale 1
    of both keys and values. Otherwise ONNX Runtime (1.31) has no kernel that reads FP8 rows, and each decode
    step converts the whole cache to half precision.
    """
    graph, config = step.graph, step.config
    options: dict[str, Any] = {"do_rotary": int(bool(step.rope))}
    scales: list[ir.Value | None] = [None, None]
    if step.cpu or graph.cache_dtype != graph.dtype:
        qkv, norms = _normed_heads(step, qkv, norms, epsilon), ()
    if graph.cache_dtype != graph.dtype:
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
        num_heads=config.num_attention_heads,
        kv_num_heads=config.num_key_value_heads,
        scale=config.head_dim**-0.5,
        **options,
    )
    width = config.num_attention_heads * config.head_dim
    return step.tokens.flatten(attended, width), (keys, values)


def _normed_heads(
    step: OnnxRuntimeStep, qkv: Sequence[ir.Value], norms: Sequence[ir.Value], epsilon: float
) -> Sequence[ir.Value]:
    """Add norms of queries and keys; `qkv` and result are as in `_fused_attention`."""
    if not norms:
        return qkv
    graph, config = step.graph, step.config
    size, heads, kv_heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    if len(qkv) == 1:
        qkv = graph.split(qkv[0], [heads * size, kv_heads * size, kv_heads * size], axis=-1)
    normed = []
    for x, count, scale in zip(qkv, (heads, kv_heads), norms, strict=False):
        x = graph.reshape(x, [0, 0, count, size])
        x = graph.op("RMSNormalization", x, scale, axis=-1, epsilon=epsilon, stash_type=1)
        normed.append(graph.reshape(x, [0, 0, count * size]))
    return [*normed, qkv[2]]


def _plain_attention(
    step: OnnxRuntimeStep, q: ir.Value, k: ir.Value, v: ir.Value, cache: Cache, window: int | None
) -> tuple[ir.Value, Cache]:
    """Add attention over the cache in fp32; q, k, v [B,heads,S,D], rotated.

    Returns [B*S,heads*D] and the updated cache.
    """
    graph, config = step.graph, step.config
    scale = config.head_dim**-0.5
    keys, present_keys = graph.written_cache(cache[0], k, step.write_index)
    values, present_values = graph.written_cache(cache[1], v, step.write_index)
    if window is None and step.tree is not None:
        attended = graph.op("Attention", q, keys, values, step.tree, scale=scale)
    elif window is None:
        seen = [q, keys, values, None, None, None, step.kv_length]
        attended = graph.op("Attention", *seen, is_causal=1, scale=scale)
    else:
        attended = graph.op("Attention", q, keys, values, step.windowed_mask(window), scale=scale)
    width = config.num_attention_heads * config.head_dim
    return step.tokens.merge_heads(attended, width), (present_keys, present_values)


def has_cpu_kernel(decoder: Decoder) -> bool:
    """Tell whether ONNX Runtime's kernel for a CPU takes the attention of a decoder.

    Of prompts that run together it rotates each as the first one, which is right without mRoPE.
    """
    config = decoder.config
    if config.recurrent is not None or config.rope.mrope_section:
        return False
    if not decoder.has_rope:
        return config.head_dim % 8 == 0
    return config.head_dim % 16 == 0 and config.rope.rotary_dim % 16 == 0
