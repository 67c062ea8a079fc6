# SPDX-License-Identifier: Apache-2.0
"""Mamba2 in standard operators: matrix products within chunks and over chunks.

For each head, with decay a_t = exp(A dt_t), the layer computes

  S_t = a_t S_(t-1) + B_t (dt_t x_t)^T        state [N,P]: N = state size, P = head size
  y_t = S_t^T C_t + D x_t

Within a chunk this is attention without softmax, whose scores are multiplied by decays; over chunks, a
product with the matrix of decays between chunks. All sums and decays are fp32; the logarithm of a decay is a
difference of cumulative sums.

Sources: "Transformers are SSMs" (Dao and Gu, 2024), section 6; transformers, modeling_nemotron_h.py. The step
dt is at least `time_step_min`, as in the latter's prefill (its decode steps have no lower bound).
"""

from __future__ import annotations

import onnx_ir as ir

from edgellm_ros.builder.graph.graph import FLOAT
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.graph.token_layout import TokenLayout
from edgellm_ros.builder.lowering.standard.recurrent import (
    ChainValues,
    Chunks,
    Present,
    State,
    causal_conv,
    cut_columns,
    decays,
    float_tensor,
    join_columns,
    lower_triangle,
    negative_exponential,
    silu,
    softplus,
)
from edgellm_ros.builder.model.recurrent import Mamba2


# x -- in_proj --+-- gate ---------------------------------------------+
#                +-- causal_conv --+-- x, B, C --+                     |
#                +-- dt -- Softplus ------------ scan -- (+ D x) -- norm(y silu(gate)) -- out_proj -->
#                                                 |
#                                             state, present state
def mamba2_layer(
    graph: ModelBuilder, mamba: Mamba2, tokens: TokenLayout, chunks: Chunks, x: ir.Value, state: State
) -> tuple[ir.Value, Present]:
    """Add a Mamba2 layer.

    x and the result are in the layout of the layers. Also returns the states after the run.
    """
    width = mamba.inner + mamba.conv_dim + mamba.heads
    projected = graph.linear("in_proj", x, mamba.hidden_size, width, mamba.bias)
    projected = tokens.unflatten(projected, width)
    gate, channels, steps = graph.split(projected, [mamba.inner, mamba.conv_dim, mamba.heads], axis=-1)
    conv_inputs, conv_shape = graph.to_fp32(channels), (mamba.conv_dim, mamba.conv_kernel - 1)
    channels, conv_state = causal_conv(
        graph, "conv1d", chunks, x=conv_inputs, state=state[0], shape=conv_shape, bias=mamba.conv_bias
    )
    chain = None
    with graph.scope("scan"):
        y, last_state, updates = _scan(graph, mamba, chunks, channels, graph.to_fp32(steps), state[1])
        if chunks.verifies:
            keys, x, dt, logs = (chunks.first(part) for part in updates)
            x, dt = graph.reshape(x, [0, 0, mamba.heads, -1]), graph.reshape(dt, [0, 0, mamba.heads, 1])
            values = graph.reshape(graph.op("Mul", x, dt), [0, 0, mamba.inner])
            chain = ChainValues(chunks.first(conv_inputs), keys, values, logs)
    y = tokens.flatten(gated_norm(graph, mamba, y, graph.to_fp32(gate)), mamba.inner)
    y = graph.linear("out_proj", y, mamba.inner, mamba.hidden_size, mamba.bias)
    return y, ((conv_state, last_state), chain)


def gated_norm(graph: ModelBuilder, mamba: Mamba2, y: ir.Value, gate: ir.Value) -> ir.Value:
    """Add the norm of y silu(gate), [B,S,heads*P] fp32 each.

    The result is of the graph's type.
    """
    with graph.module("norm"):
        y = graph.op("Mul", y, silu(graph, gate))
        size = mamba.inner // mamba.groups
        y = graph.reshape(y, [0, 0, mamba.groups, size])
        ones = graph.constant([1.0] * size, FLOAT)
        y = graph.op("RMSNormalization", y, ones, axis=-1, epsilon=mamba.epsilon, stash_type=1)
        y = graph.reshape(y, [0, 0, mamba.inner])
        return graph.from_fp32(graph.op("Mul", y, float_tensor(graph, "weight", mamba.inner)))


def _scan(
    graph: ModelBuilder, mamba: Mamba2, chunks: Chunks, channels: ir.Value, steps: ir.Value, state: ir.Value
) -> tuple[ir.Value, ir.Value, tuple[ir.Value, ...]]:
    """Add the scan of channels [B,S,C] fp32.

    steps: [B,S,heads] fp32; state: in its binding's layout. Returns y [B,S,heads*P] fp32, the last state, and
    B, x, dt and log-decays of whole chunks. Letters in shapes: G groups, R heads of a group, c chunks, Q
    tokens of a chunk.
    """
    op, constant = graph.op, graph.constant
    groups, size, head_dim = mamba.groups, mamba.state_size, mamba.head_dim
    heads = mamba.heads // groups

    steps = op("Add", chunks.pad(steps), float_tensor(graph, "dt_bias", mamba.heads))
    dt = softplus(graph, steps)
    dt = op("Max", dt, constant(mamba.time_step_min, FLOAT))
    dt = op("Mul", dt, chunks.valid)  # no decay and no update in padding
    logs = op("Mul", dt, negative_exponential(graph, "A_log", mamba.heads))
    rows_of_dt, rows_of_logs = dt, logs
    logs = graph.transpose(chunks.split(logs, groups, heads), (0, 3, 4, 1, 2))  # [B,G,R,c,Q]
    dt = graph.transpose(chunks.split(dt, groups, heads, 1), (0, 3, 4, 1, 2, 5))  # [B,G,R,c,Q,1]

    sizes = [mamba.inner, groups * size, groups * size]
    x, b, c = graph.split(chunks.pad(channels), sizes, axis=-1)
    updates = b, x, rows_of_dt, rows_of_logs
    x = graph.transpose(chunks.split(x, groups, heads, head_dim), (0, 3, 4, 1, 2, 5))  # [B,G,R,c,Q,P]
    b, c = (chunks.split(part, groups, 1, size) for part in (b, c))
    b = graph.transpose(b, (0, 3, 4, 1, 5, 2))  # [B,G,1,c,N,Q]
    c = graph.transpose(c, (0, 3, 4, 1, 2, 5))  # [B,G,1,c,Q,N]
    update = op("Mul", x, dt)

    # 1. Within a chunk: weights [B,G,R,c,Q,Q].
    since_start = op("CumSum", logs, constant(-1))  # [B,G,R,c,Q]
    weights = op("Mul", op("MatMul", c, b), decays(graph, since_start, chunks.causal))
    y = op("MatMul", weights, update)

    # 2. What each chunk adds to the state: [B,G,R,c,N,P].
    total = op("ReduceSum", logs, constant([-1]), keepdims=1)  # [B,G,R,c,1]
    to_end = op("Unsqueeze", op("Exp", op("Sub", total, since_start)), constant([-1]))
    added = op("MatMul", b, op("Mul", update, to_end))

    # 3. The states before each chunk and after the last one: [B,G,R,c+1,N*P].
    started = op("Pad", op("Squeeze", total, constant([-1])), constant([0, 0, 0, 1, 0, 0, 0, 0]))
    started = op("CumSum", started, constant(-1))  # [B,G,R,c+1]
    with graph.scope("chunks"):
        mask = lower_triangle(graph, op("Add", chunks.count, constant([1])))
    state = join_columns(graph, state, mamba.heads, size, head_dim)
    parts = (
        graph.reshape(state, [0, groups, heads, 1, size * head_dim]),
        graph.reshape(added, [0, 0, 0, -1, size * head_dim]),
    )
    states = op("MatMul", decays(graph, started, mask), op("Concat", *parts, axis=3))
    before = op("Slice", states, constant([0]), constant([-1]), constant([3]))
    last = op("Slice", states, constant([-1]), constant([2**31 - 1]), constant([3]))
    before = graph.reshape(before, [0, 0, 0, -1, size, head_dim])

    # 4. What the earlier chunks add to y.
    from_start = op("Unsqueeze", op("Exp", since_start), constant([-1]))
    y = op("Add", y, op("Mul", op("MatMul", c, before), from_start))
    skip = graph.reshape(float_tensor(graph, "D", mamba.heads), [groups, heads, 1, 1, 1])
    y = op("Add", y, op("Mul", x, skip))
    y = graph.reshape(graph.transpose(y, (0, 3, 4, 1, 2, 5)), [0, -1, mamba.inner])
    last = graph.reshape(last, [0, mamba.heads, size, head_dim])
    return chunks.cut(y), cut_columns(graph, last, mamba.heads, size, head_dim), updates
