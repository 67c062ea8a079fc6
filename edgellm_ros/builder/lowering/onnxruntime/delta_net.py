# SPDX-License-Identifier: Apache-2.0
"""Gated delta nets for ONNX Runtime's CUDA provider."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.graph.graph import FLOAT, ORT_DOMAIN
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.lowering.onnxruntime.recurrent import (
    CudaRun,
    Scan,
    Scanned,
    conv_weights,
    cut,
)
from edgellm_ros.builder.lowering.standard.delta_net import NORM_EPSILON
from edgellm_ros.builder.lowering.standard.recurrent import (
    Present,
    State,
    cut_columns,
    float_tensor,
    join_columns,
    negative_exponential,
)
from edgellm_ros.builder.model.recurrent import DeltaNet
from edgellm_ros.engine_directory.recurrent_config import state_columns

FLOAT16 = ir.DataType.FLOAT16
CHUNKED_DIM = 128  # of keys and values: the size that GatedDeltaNet scans in chunks, on tensor cores


# x -- in_proj --+-- z ------------------------------------------+
#                +-- channels --+                                |
#                +-- b, a ------+-- If -- y -- norm(y) silu(z) -- out_proj -->
#                    states ----+    +-- present states
def delta_net_cuda_layer(
    graph: ModelBuilder, net: DeltaNet, run: CudaRun, x: ir.Value, state: State
) -> tuple[ir.Value, Present]:
    """Add a gated delta net: `delta_net_layer` for CUDA."""
    parts = net.projections
    projected = graph.joined_linears("in_proj", parts, x, net.hidden_size)
    projected = graph.to_fp32(run.tokens.unflatten(projected, sum(parts.values())))
    channels, gate, b, a = cut(graph, projected, list(parts.values()))
    conv = conv_weights(graph, net.conv_dim, net.conv_kernel, bias=False)

    # A verification has fewer tokens than a chunk. An engine in fp32 keeps fp32 keys and values.
    sizes = net.key_dim == net.value_dim == CHUNKED_DIM
    in_chunks = sizes and not run.verifies and graph.dtype != FLOAT

    def scan(valid: ir.Value | None) -> Scan:
        return lambda mixed, before: _delta_rule(
            graph, net, mixed, (b, a), before, valid=valid, in_chunks=in_chunks
        )

    with graph.scope("delta_rule"):
        y, after = run.mix(conv, channels, state, one=scan(None), several=scan(run.valid))
    with graph.module("norm"):
        scale = float_tensor(graph, "weight", net.value_dim)
        (y,) = graph.ops(
            "GatedRMSNorm",
            *(y, scale, gate),
            outputs=1,
            domain=ORT_DOMAIN,
            epsilon=net.epsilon,
            activation="silu",
        )
        y = graph.from_fp32(y)
    y = run.tokens.flatten(y, net.values)
    return graph.linear("out_proj", y, net.values, net.hidden_size), after


def _delta_rule(
    graph: ModelBuilder,
    net: DeltaNet,
    channels: ir.Value,
    gates: tuple[ir.Value, ir.Value],
    state: ir.Value,
    *,
    valid: ir.Value | None,
    in_chunks: bool,
) -> Scanned:
    """Add the delta rule.

    channels [B,S,q|k|v], gates b and a [B,S,heads] fp32, state in its binding's layout; valid [B,S,1], None
    for one token: then each group of columns is a head of `LinearAttention`; in_chunks: with `valid`. Returns
    y [B,S,heads*dv] fp32, the state, and the values of a chain.
    """
    b, a = gates
    heads, groups = net.value_heads, 1
    q, k, v = cut(graph, channels, [net.keys, net.keys, net.values])
    q, k = (_unit_heads(graph, net, part) for part in (q, k))
    logs, strengths = graph.ops(
        "LinearAttentionGate",
        *(a, float_tensor(graph, "dt_bias", net.value_heads)),
        *(negative_exponential(graph, "A_log", net.value_heads), b),
        outputs=2,
        domain=ORT_DOMAIN,
    )
    if valid is not None:  # no decay and no update in padding
        logs, strengths = (graph.op("Mul", gate, valid) for gate in (logs, strengths))
        if in_chunks:
            y, last = _scan_in_chunks(graph, net, (q, k, v), (logs, strengths), state)
            return y, last, (k, v, logs, strengths)
        state = join_columns(graph, state, heads, net.key_dim, net.value_dim)
    else:
        groups = net.value_dim // state_columns(net.value_dim)
    chain = k, v, logs, strengths
    if groups > 1:
        logs, strengths = (_repeat(graph, gate, heads, groups) for gate in (logs, strengths))
    y, last = graph.ops(
        "LinearAttention",
        *(q, k, v, state, logs, strengths),
        outputs=2,
        domain=ORT_DOMAIN,
        update_rule="gated_delta",
        q_num_heads=net.key_heads,
        kv_num_heads=heads * groups,
        scale=net.key_dim**-0.5,
    )
    if valid is not None:
        last = cut_columns(graph, last, heads, net.key_dim, net.value_dim)
    return y, last, chain


def _scan_in_chunks(
    graph: ModelBuilder,
    net: DeltaNet,
    parts: tuple[ir.Value, ir.Value, ir.Value],
    gates: tuple[ir.Value, ir.Value],
    state: ir.Value,
) -> tuple[ir.Value, ir.Value]:
    """Add a scan of a prompt's tokens in chunks.

    Products are of fp16, also those with the state, which is kept in fp32. parts: unit queries and keys
    [B,S,key heads*dk], values [B,S,heads*dv]; gates: logarithms of decays, strengths [B,S,heads]; all fp32,
    as y [B,S,heads*dv] and the state [B,heads,dk,dv] are.
    """
    counts = net.key_heads, net.key_heads, net.value_heads
    heads = [graph.reshape(part, [0, 0, count, -1]) for part, count in zip(parts, counts, strict=True)]
    q, k, v = (graph.op("Cast", part, to=int(FLOAT16)) for part in heads)
    y, last = graph.ops(
        "GatedDeltaNet",
        *(q, k, v, None, *gates, graph.transpose(state, (0, 1, 3, 2))),  # the operator's is [B,heads,dv,dk]
        outputs=2,
        domain=ORT_DOMAIN,
        update_rule="gated_delta",
        scale=net.key_dim**-0.5,
    )
    y = graph.reshape(graph.op("Cast", y, to=int(FLOAT)), [0, 0, net.values])
    return y, graph.transpose(last, (0, 1, 3, 2))


def _repeat(graph: ModelBuilder, x: ir.Value, heads: int, groups: int) -> ir.Value:
    """Repeat each value of x [B,1,heads] for its head's groups: [B,1,heads*groups]."""
    x = graph.op("Expand", graph.reshape(x, [0, 0, heads, 1]), graph.constant([1, 1, 1, groups]))
    return graph.reshape(x, [0, 0, heads * groups])


def _unit_heads(graph: ModelBuilder, net: DeltaNet, x: ir.Value) -> ir.Value:
    """Add x / sqrt(sum of squares + epsilon) of each head, x [B,S,heads*dk].

    The operator is an RMSNorm, whose root is of the mean of squares, so scale and epsilon are divided by dk.
    """
    scale = graph.constant(np.full(net.key_dim, net.key_dim**-0.5), FLOAT)
    epsilon = NORM_EPSILON / net.key_dim
    x = graph.reshape(x, [0, 0, net.key_heads, net.key_dim])
    x = graph.op("RMSNormalization", x, scale, axis=-1, epsilon=epsilon, stash_type=1)
    return graph.reshape(x, [0, 0, net.keys])
