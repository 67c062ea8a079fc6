# SPDX-License-Identifier: Apache-2.0
"""Mamba2 layers for ONNX Runtime's CUDA provider."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.graph.graph import FLOAT, ORT_DOMAIN
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.lowering.onnxruntime.recurrent import (
    CudaRun,
    Scanned,
    conv_weights,
    cut,
)
from edgellm_ros.builder.lowering.standard.recurrent import (
    Present,
    State,
    cut_columns,
    float_tensor,
    join_columns,
    negative_exponential,
    silu,
)
from edgellm_ros.builder.model.recurrent import Mamba2
from edgellm_ros.engine_directory.recurrent_config import ROW, state_columns


# x -- in_proj --+-- gate ---------------------------------------+
#                +-- channels --+                                |
#                +-- dt --------+-- If -- y -- norm(y silu(gate)) -- out_proj -->
#                    states ----+    +-- present states
def mamba2_cuda_layer(
    graph: ModelBuilder, mamba: Mamba2, run: CudaRun, x: ir.Value, state: State
) -> tuple[ir.Value, Present]:
    """Add a Mamba2 layer: `mamba2_layer` for CUDA."""
    sizes = [mamba.inner, mamba.conv_dim, mamba.heads]
    projected = graph.linear("in_proj", x, mamba.hidden_size, sum(sizes), mamba.bias)
    projected = graph.to_fp32(run.tokens.unflatten(projected, sum(sizes)))
    gate, channels, steps = cut(graph, projected, sizes)
    conv = conv_weights(graph, mamba.conv_dim, mamba.conv_kernel, mamba.conv_bias)

    with graph.scope("scan"):
        y, after = run.mix(
            conv,
            channels,
            state,
            one=lambda mixed, before: _scan_step(graph, mamba, mixed, steps, before),
            several=lambda mixed, before: _scan_tokens(graph, mamba, mixed, steps, before, run.valid),
        )
    y = _gated_norm(graph, mamba, y, gate)
    return graph.linear("out_proj", y, mamba.inner, mamba.hidden_size, mamba.bias), after


def _scan_step(
    graph: ModelBuilder, mamba: Mamba2, channels: ir.Value, steps: ir.Value, state: ir.Value
) -> Scanned:
    """Add the scan of one token's channels [B,1,C] fp32.

    steps: [B,1,heads] fp32; state: in its binding's layout. Each group of columns is a head of
    `LinearAttention`, with the decay of its own head. Returns y [B,heads*P] fp32, the state, and three
    tensors that have only the shapes of a chain's values: no chain has one token.
    """
    op, heads, columns = graph.op, mamba.heads, state_columns(mamba.head_dim)
    groups = mamba.head_dim // columns  # of a head
    softplus = _softplus(graph, mamba, steps)
    dt = graph.reshape(softplus, [0, 0, heads, 1])
    decay = graph.reshape(negative_exponential(graph, "A_log", heads), [heads, 1])
    if mamba.time_step_min > 0:  # repeats dt for the groups too
        dt = op("Max", dt, graph.constant([mamba.time_step_min] * groups, FLOAT))
    elif groups > 1:
        decay = op("Expand", decay, graph.constant([heads, groups]))
    logs = graph.reshape(op("Mul", dt, decay), [0, 0, heads * groups])
    x, b, c = _parts(graph, mamba, channels)
    update = graph.reshape(x, [0, 0, heads, groups, columns])
    update = op("Mul", update, graph.reshape(dt, [0, 0, heads, -1, 1]))
    update = graph.reshape(update, [0, 0, mamba.inner])
    y, last = _linear_attention(graph, mamba, (c, b, update, state, logs), heads * groups)
    return _skip_step(graph, mamba, x, y), last, (b, update, softplus)


def _scan_tokens(
    graph: ModelBuilder,
    mamba: Mamba2,
    channels: ir.Value,
    steps: ir.Value,
    state: ir.Value,
    valid: ir.Value,
) -> Scanned:
    """Add `_scan_step` for several tokens.

    valid [B,S,1] -> y [B*S,heads*P], state, values of a chain. P is padded to whole rows of the kernel for
    many tokens.
    """
    op, heads, head_dim = graph.op, mamba.heads, mamba.head_dim
    dt = _softplus(graph, mamba, steps)
    if mamba.time_step_min > 0:
        dt = op("Max", dt, graph.constant(mamba.time_step_min, FLOAT))
    dt = op("Mul", dt, valid)  # no decay and no update in padding
    logs = op("Mul", dt, negative_exponential(graph, "A_log", heads))
    x, b, c = _parts(graph, mamba, channels)
    update = op("Mul", x, graph.reshape(dt, [0, 0, heads, 1]))
    chain = b, graph.reshape(update, [0, 0, mamba.inner]), logs
    state = join_columns(graph, state, heads, mamba.state_size, head_dim)
    columns = -(-head_dim // ROW) * ROW
    padded = graph.constant([0] * 7 + [columns - head_dim])
    if columns > head_dim:
        update, state = op("Pad", update, padded), op("Pad", state, padded)
    update = graph.reshape(update, [0, 0, heads * columns])
    y, last = _linear_attention(graph, mamba, (c, b, update, state, logs), heads)
    y = graph.reshape(y, [0, 0, heads, columns])
    if columns > head_dim:
        ends = graph.constant([0]), graph.constant([head_dim]), graph.constant([-1])
        y, last = op("Slice", y, *ends), op("Slice", last, *ends)
    skip = op("Mul", x, graph.reshape(float_tensor(graph, "D", heads), [heads, 1]))
    y = graph.reshape(op("Add", y, skip), [-1, mamba.inner])
    return y, cut_columns(graph, last, heads, mamba.state_size, head_dim), chain


def _softplus(graph: ModelBuilder, mamba: Mamba2, steps: ir.Value) -> ir.Value:
    """Add softplus(steps + bias)."""
    ones = graph.constant(np.ones(mamba.heads), FLOAT)
    bias = float_tensor(graph, "dt_bias", mamba.heads)
    (dt,) = graph.ops("LinearAttentionGate", steps, bias, ones, outputs=1, domain=ORT_DOMAIN)
    return dt


def _parts(graph: ModelBuilder, mamba: Mamba2, channels: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Cut the channels into x [B,S,heads,P], B and C [B,S,groups*N]."""
    shared = mamba.groups * mamba.state_size
    x, b, c = cut(graph, channels, [mamba.inner, shared, shared])
    return graph.reshape(x, [0, 0, mamba.heads, mamba.head_dim]), b, c


def _linear_attention(
    graph: ModelBuilder, mamba: Mamba2, inputs: tuple[ir.Value, ...], heads: int
) -> Sequence[ir.Value]:
    """Add `LinearAttention` over `heads` heads; inputs: C, B, dt x, state, decays."""
    return graph.ops(
        "LinearAttention",
        *inputs,
        outputs=2,
        domain=ORT_DOMAIN,
        update_rule="gated",
        q_num_heads=mamba.groups,
        kv_num_heads=heads,
        scale=1.0,
    )


def _skip_step(graph: ModelBuilder, mamba: Mamba2, x: ir.Value, y: ir.Value) -> ir.Value:
    """Add y + D x of one token in one kernel.

    x [B,1,heads,P], y [B,1,heads*P] -> [B,heads*P]. HyperConnectionPostMix adds the product of one vector for
    all streams with a factor for each value of each stream. The rows of x are the factors; D is the vector.
    """
    d = graph.reshape(float_tensor(graph, "D", mamba.heads), [mamba.heads, 1])
    d = graph.reshape(graph.op("Expand", d, graph.constant([mamba.heads, mamba.head_dim])), [mamba.inner])
    x, y = (graph.reshape(part, [-1, mamba.inner]) for part in (x, y))
    (y,) = graph.ops("HyperConnectionPostMix", y, d, x, outputs=1, domain=ORT_DOMAIN)
    return y


def _gated_norm(graph: ModelBuilder, mamba: Mamba2, y: ir.Value, gate: ir.Value) -> ir.Value:
    """Add `gated_norm` with the weight in its node.

    y [B*S,n], gate [B,S,n] fp32 -> [B*S,n]; n = heads*P. ONNX Runtime takes a scale [1,groups,P'] for rows
    [B*S,groups,P']. Its BranchwiseRMSNorm takes longer: 3.9 instead of 3.5 us for 8 groups of 960 on an H200.
    """
    with graph.module("norm"):
        y = graph.op("Mul", y, silu(graph, graph.reshape(gate, [-1, mamba.inner])))
        size = mamba.inner // mamba.groups
        y = graph.reshape(y, [-1, mamba.groups, size])
        scale = graph.reshape(float_tensor(graph, "weight", mamba.inner), [1, mamba.groups, size])
        y = graph.op("RMSNormalization", y, scale, axis=-1, epsilon=mamba.epsilon, stash_type=1)
        return graph.from_fp32(graph.reshape(y, [-1, mamba.inner]))
