# SPDX-License-Identifier: Apache-2.0
"""What attention blocks share: heads, their norms and RoPE, the gate, o_proj."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import onnx_ir as ir

from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.graph.token_layout import TokenLayout
from edgellm_ros.builder.lowering.norms import rms_norm
from edgellm_ros.builder.model.decoder import Attention, Decoder

NODES = {"self_attn": "attn"}  # modules that have another name in the paths of nodes


@dataclass(frozen=True)
class Heads:
    """Queries, keys and values of a run's tokens, after norms and RoPE."""

    q: ir.Value  # [B,heads,S,D]
    k: ir.Value  # [B,Hkv,S,D]
    v: ir.Value  # [B,Hkv,S,D]
    gate: ir.Value | None  # heads * D values in the layout of the layers; None if the block has no gate


def attention_module(graph: ModelBuilder, name: str) -> AbstractContextManager[None]:
    """Enter the module of an attention block."""
    return graph.module(name, nodes=NODES.get(name))


# (q_norm, k_norm: with head_norms; RotaryEmbedding: with rope; gate: if the block is gated)
#
# projected --+-- q -- q_norm -- RotaryEmbedding -- q
#             +-- k -- k_norm -- RotaryEmbedding -- k
#             +-- v ------------------------------- v
#             +-- gate
def make_heads(
    graph: ModelBuilder,
    decoder: Decoder,
    block: Attention,
    *,
    tokens: TokenLayout,
    projected: Sequence[ir.Value],
    rope: Sequence[ir.Value],
) -> Heads:
    """Add the heads of an attention block in the current module.

    projected: results of q_proj, k_proj and v_proj in the layout of the layers; rope: cos, sin and, if these
    are tables, position ids.
    """
    size, kv_heads = decoder.config.head_dim, decoder.config.num_key_value_heads
    q, k, v = projected
    q, gate = split_gate(graph, decoder, block, tokens, q)
    q, k, v = graph.transpose(q, (0, 2, 1, 3)), *(tokens.split_heads(rows, kv_heads, size) for rows in (k, v))
    q, k = (rotate(graph, decoder, block, *head, rope) for head in (("q_norm", q), ("k_norm", k)))
    return Heads(q, k, v, gate)


def split_gate(
    graph: ModelBuilder, decoder: Decoder, block: Attention, tokens: TokenLayout, q: ir.Value
) -> tuple[ir.Value, ir.Value | None]:
    """Split the result of q_proj into queries [B,S,heads,D] and the gate.

    q and the gate are in the layout of the layers.
    """
    size, heads = decoder.config.head_dim, decoder.config.num_attention_heads
    if not block.gated:
        return tokens.unflatten(q, heads, size), None
    q, gate = graph.split(tokens.unflatten(q, heads, 2 * size), [size, size], axis=-1)
    return q, tokens.join_heads(gate, heads * size)


def rotate(
    graph: ModelBuilder,
    decoder: Decoder,
    block: Attention,
    norm: str,
    x: ir.Value,
    rope: Sequence[ir.Value],
) -> ir.Value:
    """Add norm and RoPE of heads [B,heads,S,D], if the block has them."""
    config = decoder.config
    if block.head_norms:
        x = rms_norm(graph, decoder.norm, norm, x, config.head_dim)
    if not block.rope:
        return x
    rotary_dim = config.rope.rotary_dim
    partial = {"rotary_embedding_dim": rotary_dim} if rotary_dim < config.head_dim else {}
    return graph.op("RotaryEmbedding", x, *rope, **partial)


# attended --(*)-- o_proj -->
# gate -- Sigmoid
def attention_output(
    graph: ModelBuilder, decoder: Decoder, block: Attention, attended: ir.Value, gate: ir.Value | None
) -> ir.Value:
    """Add gate and o_proj in the current module.

    attended and gate: heads * D values of each token, in the layout of the layers.
    """
    config = decoder.config
    if gate is not None:
        attended = graph.op("Mul", attended, graph.op("Sigmoid", gate))
    width = config.num_attention_heads * config.head_dim
    return graph.linear("o_proj", attended, width, config.hidden_size, block.output_bias)
