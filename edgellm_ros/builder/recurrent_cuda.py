# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers for ONNX Runtime's CUDA provider.

A decode step of the standard graphs (`mamba2.py`, `delta_net.py`) has some 70 small kernels per layer, and
copies from host memory, which a CUDA graph cannot record: Split and Concat of parts of unequal sizes copy the
sizes and addresses. Here a run chooses between two branches of an If, by the number of tokens per sequence,
which is known on the host:

  one token     -- CausalConvWithState -- LinearAttention --+-- y, states -->
  more tokens   -- convolution and chunks of the standard graph --+

The operators of the first branch are ONNX Runtime's own (domain com.microsoft), one kernel each. They compute
in fp32 as the standard graph does. The second branch is for prompts, whose tokens LinearAttention would
compute one after another; its kernel for that is slow unless d_v is a multiple of 32 (Mamba2's may be 80).

Outside of the second branch there is no Split of unequal parts, no Concat of tensors, and no value that the
host computes from the shapes and the GPU would have to be given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.delta_net import NORM_EPSILON, DeltaNet, delta_rule
from edgellm_ros.builder.graph import BOOL, FLOAT, INT64
from edgellm_ros.builder.layers import ModelBuilder
from edgellm_ros.builder.mamba2 import Mamba2, gated_norm, scan
from edgellm_ros.builder.recurrent import (
    Chunks,
    State,
    causal_conv,
    chunk_sizes,
    conv_taps,
    float_tensor,
    make_chunks,
    negative_exponential,
)
from edgellm_ros.builder.token_layout import TokenLayout
from edgellm_ros.engine_directory.config import LanguageModelConfig

ORT_DOMAIN = "com.microsoft"
DECODE_KEY_DIMS = (64, 128, 256)  # LinearAttention's kernels for few tokens take any d_v with these d_k
SHARED_BYTES = 48 * 1024  # of a block on every GPU; the kernel for other d_k has the state of a head there
MAX_THREADS = 1024  # of a block, one for each row and column of the state
MAX_HEAD_DIM = 256  # of attention

Mixed = tuple[ir.Value, ir.Value, ir.Value]  # y [B,S,...], present convolution, present state; fp32


def has_kernels(config: LanguageModelConfig) -> bool:
    """Return whether the CUDA kernels take the sizes of a hybrid's heads, on every GPU.

    These limits are those of LinearAttention for one token and of GroupQueryAttention, as their sources
    have them (linear_attention_impl.cu, group_query_attention_helper.h).
    """
    assert config.recurrent is not None
    key_dim, value_dim = config.recurrent.key_dim, config.recurrent.value_dim
    longest = max(key_dim, value_dim)
    state = (key_dim * value_dim + key_dim + longest) * 4
    recurrent = key_dim in DECODE_KEY_DIMS or (state <= SHARED_BYTES and longest <= MAX_THREADS)
    return recurrent and config.head_dim % 8 == 0 and config.head_dim <= MAX_HEAD_DIM


def cut(graph: ModelBuilder, x: ir.Value, sizes: Sequence[int]) -> Sequence[ir.Value]:
    """Cut the last axis into parts without copies from host memory.

    Takes one kernel if the parts are equal, or else one for each.
    """
    if len(set(sizes)) == 1:
        return graph.split(x, sizes, axis=-1)
    ends = np.cumsum(sizes)
    constant = graph.constant
    return [
        graph.op("Slice", x, constant([end - size]), constant([end]), constant([-1]))
        for end, size in zip(ends.tolist(), sizes, strict=True)
    ]


class CudaRun:
    """What the recurrent layers of a graph share; embeds [B,S,H], valid_tokens [B] i64.

    The tensors of `Chunks` are made once, in an If of their own: for one token they are placeholders.
    """

    def __init__(
        self, graph: ModelBuilder, tokens: TokenLayout, embeds: ir.Value, valid_tokens: ir.Value
    ) -> None:
        self.graph, self.tokens = graph, tokens
        self._embeds, self._valid_tokens = embeds, valid_tokens
        placeholders = graph.constant([0]), graph.constant([[[1.0]]], FLOAT), graph.constant([[True]], BOOL)

        def one() -> list[ir.Value]:
            return [graph.op("Identity", value) for value in placeholders]

        def several() -> list[ir.Value]:
            chunks = make_chunks(graph, embeds, valid_tokens)
            return [chunks.index, chunks.valid, chunks.causal]

        with graph.scope("chunks"):
            length = graph.op("Shape", embeds, start=1, end=2)
            self._single = graph.op("Equal", length, graph.constant([1]))
            self._shared = graph.either(self._single, one, several, (INT64, FLOAT, BOOL))

    def mix(self, one: Callable[[], Mixed], several: Callable[[Chunks], Mixed]) -> Mixed:
        """Add both branches of a layer."""
        graph = self.graph

        def otherwise() -> Mixed:
            # Sizes stay on the host, so each branch computes its own.
            sizes = chunk_sizes(graph, self._embeds)
            index, valid, causal = self._shared
            return several(Chunks(graph, *sizes, self._valid_tokens, index, valid, causal))

        y, conv, state = graph.either(self._single, one, otherwise, (FLOAT, FLOAT, FLOAT))
        return y, conv, state


# state -- CausalConvWithState -- present state
# x ----------+         +-- y -->
def _conv_step(
    graph: ModelBuilder, taps: ir.Value, bias: ir.Value | None, x: ir.Value, state: ir.Value, channels: int
) -> tuple[ir.Value, ir.Value]:
    """Add the convolution of one token and SiLU in fp32: x [B,1,C], state [B,C,K-1] -> y [B,1,C], state."""
    y, present = graph.ops(
        "CausalConvWithState",
        graph.reshape(x, [-1, channels, 1]),
        taps,
        bias,
        state,
        outputs=2,
        domain=ORT_DOMAIN,
        activation="silu",
    )
    return graph.reshape(y, [-1, 1, channels]), present


def _conv_weights(
    graph: ModelBuilder, channels: int, kernel: int, bias: bool
) -> tuple[ir.Value, ir.Value | None]:
    """Add weights [C,1,K] and bias [C] of the module conv1d; ONNX Runtime transposes the weights once."""
    with graph.module("conv1d"):
        taps = graph.transpose(conv_taps(graph, channels, kernel), 1, 0)
        return graph.reshape(taps, [channels, 1, kernel]), (
            float_tensor(graph, "bias", channels) if bias else None
        )


# x -- in_proj --+-- gate ---------------------------------------+
#                +-- channels --+                                |
#                +-- dt --------+-- If -- y -- norm(y silu(gate)) -- out_proj -->
#                    states ----+    +-- present states
def mamba2_cuda_layer(
    graph: ModelBuilder, mamba: Mamba2, run: CudaRun, x: ir.Value, state: State
) -> tuple[ir.Value, State]:
    """Add a Mamba2 layer: `mamba2_layer` for CUDA."""
    sizes = [mamba.inner, mamba.conv_dim, mamba.heads]
    projected = graph.linear("in_proj", x, mamba.hidden_size, sum(sizes), mamba.bias)
    projected = graph.to_fp32(run.tokens.unflatten(projected, sum(sizes)))
    gate, channels, steps = cut(graph, projected, sizes)
    conv = _conv_weights(graph, mamba.conv_dim, mamba.conv_kernel, mamba.conv_bias)

    def one() -> Mixed:
        mixed, present = _conv_step(graph, *conv, channels, state[0], mamba.conv_dim)
        y, last = _mamba2_step(graph, mamba, mixed, steps, state[1])
        return y, present, last

    def several(chunks: Chunks) -> Mixed:
        shape = mamba.conv_dim, mamba.conv_kernel - 1
        mixed, present = causal_conv(graph, "conv1d", chunks, channels, state[0], shape, mamba.conv_bias)
        y, last = scan(graph, mamba, chunks, mixed, steps, state[1])
        return y, present, last

    with graph.scope("scan"):
        y, conv_state, last_state = run.mix(one, several)
    y = run.tokens.flatten(gated_norm(graph, mamba, y, gate), mamba.inner)
    return graph.linear("out_proj", y, mamba.inner, mamba.hidden_size, mamba.bias), (conv_state, last_state)


def _mamba2_step(
    graph: ModelBuilder, mamba: Mamba2, channels: ir.Value, steps: ir.Value, state: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Add the scan of one token, which `LinearAttention` computes with q = C, k = B, v = dt x.

    channels [B,1,C] fp32, steps [B,1,heads] fp32, state [B,heads,N,P]. Returns y [B,1,heads*P] fp32 and the
    state.
    """
    op, heads = graph.op, mamba.heads
    ones = graph.constant(np.ones(heads), FLOAT)
    bias = float_tensor(graph, "dt_bias", heads)
    (dt,) = graph.ops("LinearAttentionGate", steps, bias, ones, outputs=1, domain=ORT_DOMAIN)  # Softplus
    dt = op("Max", dt, graph.constant(mamba.time_step_min, FLOAT))
    logs = op("Mul", dt, negative_exponential(graph, "A_log", heads))
    shared = mamba.groups * mamba.state_size
    x, b, c = cut(graph, channels, [mamba.inner, shared, shared])
    x = graph.reshape(x, [0, 0, heads, mamba.head_dim])
    update = op("Mul", x, graph.reshape(dt, [0, 0, heads, 1]))
    y, last = graph.ops(
        "LinearAttention",
        *(c, b, graph.reshape(update, [0, 0, mamba.inner]), state, logs),
        outputs=2,
        domain=ORT_DOMAIN,
        update_rule="gated",
        q_num_heads=mamba.groups,
        kv_num_heads=heads,
        scale=1.0,
    )
    skip = op("Mul", x, graph.reshape(float_tensor(graph, "D", heads), [heads, 1]))
    return op("Add", y, graph.reshape(skip, [0, 0, mamba.inner])), last


# x -- in_proj --+-- z ------------------------------------------+
#                +-- channels --+                                |
#                +-- b, a ------+-- If -- y -- norm(y) silu(z) -- out_proj -->
#                    states ----+    +-- present states
def delta_net_cuda_layer(
    graph: ModelBuilder, net: DeltaNet, run: CudaRun, x: ir.Value, state: State, max_tokens: int
) -> tuple[ir.Value, State]:
    """Add a gated delta net: `delta_net_layer` for CUDA."""
    parts = {
        "in_proj_qkv": net.conv_dim,
        "in_proj_z": net.values,
        "in_proj_b": net.value_heads,
        "in_proj_a": net.value_heads,
    }
    projected = graph.joined_linears("in_proj", parts, x, net.hidden_size)
    projected = graph.to_fp32(run.tokens.unflatten(projected, sum(parts.values())))
    channels, gate, b, a = cut(graph, projected, list(parts.values()))
    conv = _conv_weights(graph, net.conv_dim, net.conv_kernel, bias=False)

    def one() -> Mixed:
        mixed, present = _conv_step(graph, *conv, channels, state[0], net.conv_dim)
        y, last = _delta_step(graph, net, mixed, (b, a), state[1])
        return y, present, last

    def several(chunks: Chunks) -> Mixed:
        shape = net.conv_dim, net.conv_kernel - 1
        mixed, present = causal_conv(graph, "conv1d", chunks, channels, state[0], shape, bias=False)
        y, last = delta_rule(graph, net, chunks, mixed, (b, a), state[1], max_tokens)
        return y, present, last

    with graph.scope("delta_rule"):
        y, conv_state, last_state = run.mix(one, several)
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
    return graph.linear("out_proj", y, net.values, net.hidden_size), (conv_state, last_state)


def _delta_step(
    graph: ModelBuilder,
    net: DeltaNet,
    channels: ir.Value,
    gates: tuple[ir.Value, ir.Value],
    state: ir.Value,
) -> tuple[ir.Value, ir.Value]:
    """Add the delta rule of one token.

    channels [B,1,q|k|v], gates b and a [B,1,heads] fp32, state [B,heads,dk,dv]. Returns y [B,1,heads*dv] fp32
    and the state.
    """
    b, a = gates
    q, k, v = cut(graph, channels, [net.keys, net.keys, net.values])
    q, k = (_unit_heads(graph, net, part) for part in (q, k))
    logs, strengths = graph.ops(
        "LinearAttentionGate",
        *(a, float_tensor(graph, "dt_bias", net.value_heads)),
        *(negative_exponential(graph, "A_log", net.value_heads), b),
        outputs=2,
        domain=ORT_DOMAIN,
    )
    y, last = graph.ops(
        "LinearAttention",
        *(q, k, v, state, logs, strengths),
        outputs=2,
        domain=ORT_DOMAIN,
        update_rule="gated_delta",
        q_num_heads=net.key_heads,
        kv_num_heads=net.value_heads,
        scale=net.key_dim**-0.5,
    )
    return y, last


def _unit_heads(graph: ModelBuilder, net: DeltaNet, x: ir.Value) -> ir.Value:
    """Add x / sqrt(sum of squares + epsilon) of each head, x [B,1,heads*dk].

    It is an RMSNorm, whose root is of the mean of squares.
    """
    scale = graph.constant(np.full(net.key_dim, net.key_dim**-0.5), FLOAT)
    epsilon = NORM_EPSILON / net.key_dim
    x = graph.reshape(x, [0, 0, net.key_heads, net.key_dim])
    x = graph.op("RMSNormalization", x, scale, axis=-1, epsilon=epsilon, stash_type=1)
    return graph.reshape(x, [0, 0, net.keys])
