# SPDX-License-Identifier: Apache-2.0
"""The gated delta net in standard operators: matrix products in and over chunks.

For each head, with decay a_t = exp(g_t) and strength b_t, the layer computes

  S_t = a_t S_(t-1) + k_t (b_t (v_t - a_t S_(t-1)^T k_t))^T      state [dk,dv]
  y_t = S_t^T q_t

Within a chunk the updates are the solution of a triangular system (the WY form of a product of Householder
matrices). Its inverse is made of the inverses of blocks of 1, 2, 4, ... tokens, with two products per size:

  [ X      ]-1     [  X^-1             ]
  [ C   Y  ]    =  [ -Y^-1 C X^-1 Y^-1 ]

which is as exact as forward substitution. (A power series of the system is not: where keys repeat, its terms
grow like binomial coefficients.) A chunk changes the state by an affine map. A prefix scan of these maps
gives the states before the chunks in log2(chunks) steps; with one chunk, its tensors are empty. All sums and
decays are fp32.

Sources: "Gated Delta Networks" (Yang, Kautz and Hatamizadeh, 2025); transformers, modeling_qwen3_5.py.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.graph.graph import FLOAT
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.graph.token_layout import TokenLayout
from edgellm_ros.builder.lowering.standard.recurrent import (
    CHUNK,
    ChainValues,
    Chunks,
    Present,
    State,
    causal_conv,
    cut_columns,
    decays,
    float_tensor,
    join_columns,
    negative_exponential,
    silu,
    softplus,
)
from edgellm_ros.builder.model.recurrent import DeltaNet

NORM_EPSILON = 1e-6  # of the norms of queries and keys; a constant in the model code
END = 2**31 - 1


# x -- in_proj --+-- qkv -- causal_conv -- q, k, v --+
#                +-- b -- Sigmoid -------------------+-- delta rule -- norm(y) silu(z) -- out_proj -->
#                +-- a -- decay ---------------------+       |                   |
#                +-- z --------------------------------------|-------------------+
#                                                   state, present state
def delta_net_layer(
    graph: ModelBuilder,
    net: DeltaNet,
    *,
    tokens: TokenLayout,
    chunks: Chunks,
    x: ir.Value,
    state: State,
    max_tokens: int,
) -> tuple[ir.Value, Present]:
    """Add a gated delta net; a run has at most `max_tokens` tokens of each sequence.

    x and the result are in the layout of the layers. Also returns the states after the run.
    """
    parts = net.projections
    projected = graph.joined_linears("in_proj", parts, x, net.hidden_size)
    projected = tokens.unflatten(projected, sum(parts.values()))
    channels, gate, b, a = graph.split(projected, list(parts.values()), axis=-1)
    conv_inputs, conv_shape = graph.to_fp32(channels), (net.conv_dim, net.conv_kernel - 1)
    channels, conv_state = causal_conv(
        graph, "conv1d", chunks, x=conv_inputs, state=state[0], shape=conv_shape, bias=False
    )
    chain = None
    with graph.scope("delta_rule"):
        gates = graph.to_fp32(b), graph.to_fp32(a)
        y, last_state, chain_parts = _delta_rule(
            graph, net, chunks, channels=channels, gates=gates, state=state[1], max_tokens=max_tokens
        )
        if chunks.verifies:
            keys, *others = chain_parts
            keys = graph.reshape(keys, [0, -1, net.keys])
            chain = ChainValues(*map(chunks.first, (conv_inputs, keys, *others)))
    with graph.module("norm"):
        y = graph.reshape(y, [0, 0, net.value_heads, net.value_dim])
        scale = float_tensor(graph, "weight", net.value_dim)
        y = graph.op("RMSNormalization", y, scale, axis=-1, epsilon=net.epsilon, stash_type=1)
        y = graph.reshape(y, [0, 0, net.values])
        y = graph.from_fp32(graph.op("Mul", y, silu(graph, graph.to_fp32(gate))))
    y = tokens.flatten(y, net.values)
    return graph.linear("out_proj", y, net.values, net.hidden_size), ((conv_state, last_state), chain)


def _delta_rule(
    graph: ModelBuilder,
    net: DeltaNet,
    chunks: Chunks,
    *,
    channels: ir.Value,
    gates: tuple[ir.Value, ir.Value],
    state: ir.Value,
    max_tokens: int,
) -> tuple[ir.Value, ir.Value, tuple[ir.Value, ...]]:
    """Add the delta rule for channels [B,S,q|k|v].

    gates: b and a [B,S,heads] fp32; state: in its binding's layout. Returns y [B,S,heads*dv] fp32, the last
    state, and keys, values, log-decays and strengths of whole chunks. Letters in shapes: G key heads, R value
    heads of a key head, c chunks, Q tokens of a chunk.
    """
    op, constant = graph.op, graph.constant
    groups, heads = net.key_heads, net.value_heads // net.key_heads
    key_dim, value_dim = net.key_dim, net.value_dim

    b, a = (chunks.pad(gate) for gate in gates)
    strengths = op("Sigmoid", b)
    logs = op("Add", a, float_tensor(graph, "dt_bias", net.value_heads))
    logs = softplus(graph, logs)
    logs = op("Mul", logs, negative_exponential(graph, "A_log", net.value_heads))
    strengths, logs = (op("Mul", x, chunks.valid) for x in (strengths, logs))
    gates = logs, strengths
    logs = graph.transpose(chunks.split(logs, groups, heads), (0, 3, 4, 1, 2))  # [B,G,R,c,Q]
    strengths = graph.transpose(chunks.split(strengths, groups, heads, 1), (0, 3, 4, 1, 2, 5))  # [...,Q,1]
    q, k, v = graph.split(chunks.pad(channels), [net.keys, net.keys, net.values], axis=-1)
    q, k = (_unit(graph, chunks.split(x, groups, 1, key_dim)) for x in (q, k))
    chain = k, v, *gates
    q, k = (graph.transpose(x, (0, 3, 4, 1, 2, 5)) for x in (q, k))  # [B,G,1,c,Q,dk]
    q = op("Mul", q, constant(key_dim**-0.5, FLOAT))
    k_columns = graph.transpose(k, (0, 1, 2, 3, 5, 4))
    v = graph.transpose(chunks.split(v, groups, heads, value_dim), (0, 3, 4, 1, 2, 5))  # [B,G,R,c,Q,dv]

    # 1. Within a chunk: updates = U - W (state before the chunk), U [...,Q,dv], W [...,Q,dk].
    since_start = op("CumSum", logs, constant(-1))  # [B,G,R,c,Q]
    weights = decays(graph, since_start, chunks.causal)  # [B,G,R,c,Q,Q]
    total = op("ReduceSum", logs, constant([-1]), keepdims=1)  # [B,G,R,c,1]
    from_start = op("Unsqueeze", op("Exp", since_start), constant([-1]))
    to_end = op("Unsqueeze", op("Exp", op("Sub", total, since_start)), constant([-2]))
    system = op("Mul", op("Mul", op("MatMul", k, k_columns), weights), strengths)
    inverse = _inverse(graph, chunks, system)
    u = op("MatMul", inverse, op("Mul", v, strengths))
    w = op("MatMul", inverse, op("Mul", k, op("Mul", strengths, from_start)))
    written = op("Mul", k_columns, to_end)  # [B,G,R,c,dk,Q]
    total = op("Unsqueeze", op("Exp", total), constant([-1]))  # [B,G,R,c,1,1]

    # 2. The state before each chunk.
    state = join_columns(graph, state, net.value_heads, key_dim, value_dim)
    first = graph.reshape(state, [0, groups, heads, 1, key_dim, value_dim])
    before = _states(graph, chunks, key_dim, first, (u, w, written, total), -(-max_tokens // CHUNK))

    # 3. The outputs, and the state after each sequence's last chunk with tokens. (A chunk of padding keeps
    # the state, but the state before it is a result of composed maps, whose last bits may differ.)
    updates = op("Sub", u, op("MatMul", w, before))  # [B,G,R,c,Q,dv]
    y = op("MatMul", op("Mul", op("MatMul", q, k_columns), weights), updates)
    y = op("Add", y, op("MatMul", op("Mul", q, from_start), before))
    y = graph.reshape(graph.transpose(y, (0, 3, 4, 1, 2, 5)), [0, -1, net.values])
    where = chunks.last_of_heads(net.value_heads)
    rows, columns, one = constant([key_dim]), constant([value_dim]), constant([1])
    shapes = (rows, columns), (one, one), (rows, chunks.size), (chunks.size, columns)
    values = before, total, written, updates
    parts = [_pick(graph, x, where, *shape) for x, shape in zip(values, shapes, strict=True)]
    last, last_total, last_written, last_updates = parts
    last = op("Add", op("Mul", last, last_total), op("MatMul", last_written, last_updates))
    return chunks.cut(y), cut_columns(graph, last, net.value_heads, key_dim, value_dim), chain


def _unit(graph: ModelBuilder, x: ir.Value) -> ir.Value:
    """Add x / sqrt(sum of squares + epsilon) over the last axis."""
    squares = graph.op("ReduceSum", graph.op("Mul", x, x), graph.constant([-1]), keepdims=1)
    return graph.op("Div", x, graph.op("Sqrt", graph.op("Add", squares, graph.constant(NORM_EPSILON, FLOAT))))


def _inverse(graph: ModelBuilder, chunks: Chunks, system: ir.Value) -> ir.Value:
    """Add the inverse of I + the part of `system` [...,Q,Q] below the diagonal."""
    op = graph.op
    with graph.scope("inverse"):
        identity, *corners = _block_masks(graph, chunks)
        inverse = op("Sub", identity, op("Mul", system, corners[0]))
        for corner in corners[1:]:
            product = op("MatMul", op("MatMul", inverse, op("Mul", system, corner)), inverse)
            inverse = op("Sub", inverse, product)
    return inverse


def _block_masks(graph: ModelBuilder, chunks: Chunks) -> list[ir.Value]:
    """Return the identity [Q,Q] and masks of the lower left corners of blocks.

    The blocks are of 2, 4, ..., CHUNK tokens.
    """
    places = np.arange(CHUNK)
    masks = [np.eye(CHUNK)]
    half = 1
    while half < CHUNK:
        blocks = places // half
        masks.append((blocks[:, None] % 2 == 1) & (blocks[:, None] - 1 == blocks[None]))
        half *= 2
    key = "block_masks"
    if key not in chunks.shared:
        with graph.scope("masks"):
            zeros, axes = graph.constant([0, 0]), graph.constant([0, 1])
            sizes = graph.op("Concat", chunks.size, chunks.size, axis=0)
            chunks.shared[key] = [
                graph.op("Slice", graph.constant(mask, FLOAT), zeros, sizes, axes) for mask in masks
            ]
    return chunks.shared[key]


def _states(
    graph: ModelBuilder,
    chunks: Chunks,
    key_dim: int,
    first: ir.Value,
    parts: tuple[ir.Value, ...],
    max_chunks: int,
) -> ir.Value:
    """Add the states before the chunks [B,G,R,c,dk,dv].

    first: [B,G,R,1,dk,dv]; parts: U, W, written, total. Chunk i changes a state S to M_i S + N_i,
    M_i = total - written W, N_i = written U. The maps of all chunks but the last are composed with those
    1, 2, 4, ... chunks before them, the first one with the first state.
    """
    op, constant = graph.op, graph.constant
    if max_chunks == 1:
        return first
    with graph.scope("states"):
        u, w, written, total = (_part(graph, x, 0, -1) for x in parts)
        identity = constant(np.eye(key_dim), FLOAT)
        matrix = op("Sub", op("Mul", total, identity), op("MatMul", written, w))
        offset = op("MatMul", written, u)
        others = op("Sub", chunks.count, constant([1]))
        used = op("Slice", first, constant([0]), others, constant([3]))  # empty if there is one chunk
        start = op("Add", op("MatMul", _part(graph, matrix, 0, 1), used), _part(graph, offset, 0, 1))
        offset = op("Concat", start, _part(graph, offset, 1, END), axis=3)
        step = 1
        while step < max_chunks - 1:
            matrix_rest, offset_rest = (_part(graph, x, step, END) for x in (matrix, offset))
            matrix_earlier, offset_earlier = (_part(graph, x, 0, -step) for x in (matrix, offset))
            matrix_start, offset_start = (_part(graph, x, 0, step) for x in (matrix, offset))
            composed = op("Add", op("MatMul", matrix_rest, offset_earlier), offset_rest)
            offset = op("Concat", offset_start, composed, axis=3)
            matrix = op("Concat", matrix_start, op("MatMul", matrix_rest, matrix_earlier), axis=3)
            step *= 2
        return op("Concat", first, offset, axis=3)


def _pick(graph: ModelBuilder, x: ir.Value, where: ir.Value, *sizes: ir.Value) -> ir.Value:
    """Add a choice of one chunk of each head.

    x [B,G,R,c,*sizes], where [B,heads] -> [B,heads,*sizes].
    """
    shape = graph.op("Concat", graph.constant([-1]), *sizes, axis=0)
    return graph.op("Gather", graph.op("Reshape", x, shape), where, axis=0)


def _part(graph: ModelBuilder, x: ir.Value, start: int, end: int) -> ir.Value:
    """Add a slice of the chunks: [B,G,R,c,...] -> [B,G,R,end-start,...]."""
    constant = graph.constant
    return graph.op("Slice", x, constant([start]), constant([end]), constant([3]))
