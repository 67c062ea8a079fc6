# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers for ONNX Runtime's CUDA provider.

A decode step of the standard graphs (`mamba2.py`, `delta_net.py`) has some 70 small kernels per layer, and
copies from host memory, which a CUDA graph cannot record: Concat copies the sizes and addresses of its parts,
and so does Split into more than four unequal ones. Here ONNX Runtime's own operators (domain com.microsoft)
compute the convolution and the state, one kernel each, in fp32 as the standard graph does. A run chooses
between two branches of an If, by the number of tokens per sequence, which is known on the host:

  one token     -- CausalConvWithState -- LinearAttention ----------+-- y, states -->
  more tokens   -- CausalConvWithState -- LinearAttention --+       |
                   padding neither decays nor changes the state; +--+
                   the last valid inputs are gathered

No branch has such a Split, a Concat of tensors, or a value that the host computes from the shapes and the GPU
would have to be given: decode steps and verifications of drafted tokens can be recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.decoder_cuda import ORT_DOMAIN
from edgellm_ros.builder.delta_net import NORM_EPSILON, DeltaNet
from edgellm_ros.builder.graph import BOOL, FLOAT
from edgellm_ros.builder.layers import ModelBuilder
from edgellm_ros.builder.mamba2 import Mamba2
from edgellm_ros.builder.recurrent import (
    ChainValues,
    Present,
    State,
    conv_taps,
    cut_columns,
    float_tensor,
    join_columns,
    negative_exponential,
    silu,
)
from edgellm_ros.builder.token_layout import TokenLayout
from edgellm_ros.engine_directory.config import LanguageModelConfig
from edgellm_ros.engine_directory.recurrent_config import (
    CHAIN_TOKENS,
    ROW,
    RecurrentConfig,
    state_columns,
)

DECODE_KEY_DIMS = (64, 128, 256)  # LinearAttention's kernels for few tokens take any d_v with these d_k
SHARED_BYTES = 48 * 1024  # of a block on every GPU; the kernel for other d_k has the state of a head there
MAX_THREADS = 1024  # of a block, one for each row and column of the state
MAX_HEAD_DIM = 256  # of attention
MAX_PARTS = 4  # of unequal sizes, along the last axis, that Split cuts without copies from host memory

# y [B*S,...] or [B,S,...], present convolution, present state; in graphs that verify chains also their keys,
# values, decays and strengths [B,S,...]. All are fp32.
Mixed = tuple[ir.Value, ...]


def has_kernels(config: LanguageModelConfig) -> bool:
    """Return whether CUDA kernels take the sizes of a hybrid's heads, on every GPU.

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
    """Cut the last axis into at most four parts.

    For so many parts ONNX Runtime has one kernel without copies.
    """
    if len(sizes) > MAX_PARTS:
        raise ValueError(f"at most {MAX_PARTS} parts, got {len(sizes)}")
    return graph.split(x, sizes, axis=-1)


class CudaRun:
    """What the recurrent layers of a graph share.

    embeds: [B,S,H]; valid_tokens: [B] i64; verifies: whether the layers return `ChainValues`.
    """

    def __init__(
        self,
        graph: ModelBuilder,
        config: RecurrentConfig,
        tokens: TokenLayout,
        embeds: ir.Value,
        valid_tokens: ir.Value,
        verifies: bool = False,
    ) -> None:
        self.graph, self.tokens, self.verifies = graph, tokens, verifies
        self._chain_parts = len(config.chain_widths) - 1 if verifies else 0  # of the results of a branch
        op, constant, past = graph.op, graph.constant, config.conv_kernel - 1
        with graph.scope("run"):
            length = op("Shape", embeds, start=1, end=2)
            self._single = op("Equal", length, constant([1]))
            count = op("Unsqueeze", valid_tokens, constant([1]))

            def several() -> list[ir.Value]:
                # Numbers of tokens that follow from the shape alone would be computed on the host.
                any_value = op("Slice", embeds, constant([0]), constant([1]), constant([2]))
                any_value = op("Cast", op("Squeeze", any_value, constant([2])), to=int(BOOL))
                ones = op("Cast", op("Equal", any_value, any_value), to=int(FLOAT))
                # The host reads the axis. A constant that nodes on the GPU read too would lie there, and be
                # copied in each run, which a recorded run cannot wait for.
                numbers = op("CumSum", ones, constant(-1))  # from 1
                known = op("LessOrEqual", numbers, op("Cast", count, to=int(FLOAT)))
                return [op("Cast", known, to=int(FLOAT))]

            (valid,) = graph.either(
                self._single, lambda: [op("Cast", count, to=int(FLOAT))], several, (FLOAT,)
            )
            self.valid = op("Unsqueeze", valid, constant([2]))  # [B,S,1]: 1 for a sequence's tokens
            # [B,1,K-1]: where the last inputs of each sequence are, in the state or among the new inputs
            kept = op("Unsqueeze", op("Add", count, constant(np.arange(past))), constant([1]))
            self.is_old = op("Less", kept, constant(past))
            self.old_inputs = op("Min", kept, constant(past - 1))
            self.new_inputs = op("Max", op("Sub", kept, constant(past)), constant(0))

    def mix(
        self, one: Callable[[], Mixed], several: Callable[[], Mixed], conv_inputs: ir.Value
    ) -> tuple[ir.Value, Present]:
        """Add both branches of a layer; conv_inputs [B,S,C]."""
        count = 3 + self._chain_parts
        y, conv, state, *parts = self.graph.either(self._single, one, several, (FLOAT,) * count)
        if not self.verifies:
            return y, ((conv, state), None)
        return y, ((conv, state), ChainValues(*map(self._first, (conv_inputs, *parts))))

    def _first(self, x: ir.Value) -> ir.Value:
        """Cut the first tokens of a run: [B,S,...] to [B,T,...]."""
        constant = self.graph.constant
        return self.graph.op("Slice", x, constant([0]), constant([CHAIN_TOKENS]), constant([1]))


# state -- CausalConvWithState -- present state
# x ----------+         +-- y -->
def _conv_step(
    graph: ModelBuilder, conv: ConvWeights, x: ir.Value, state: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Add the convolution of one token and SiLU in fp32.

    x [B,1,C], state [B,C,K-1] -> y [B,1,C], state.
    """
    y, present = _conv(graph, conv, graph.reshape(x, [-1, conv.channels, 1]), state)
    return graph.reshape(y, [-1, 1, conv.channels]), present


def _conv_tokens(
    run: CudaRun, conv: ConvWeights, x: ir.Value, state: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Add `_conv_step` for x [B,S,C].

    The state after it has the last valid inputs of each sequence.
    """
    graph, op = run.graph, run.graph.op
    x, channels = graph.transpose(x, 0, 2, 1), graph.constant([1, conv.channels, 1])
    y, _ = _conv(graph, conv, x, state)
    old = op("GatherElements", state, op("Expand", run.old_inputs, channels), axis=2)
    new = op("GatherElements", x, op("Expand", run.new_inputs, channels), axis=2)
    return graph.transpose(y, 0, 2, 1), op("Where", run.is_old, old, new)


def _conv(
    graph: ModelBuilder, conv: ConvWeights, x: ir.Value, state: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Add the convolution and SiLU of x [B,C,S] after the inputs `state` [B,C,K-1]."""
    y, present = graph.ops(
        "CausalConvWithState",
        *(x, conv.taps, conv.bias, state),
        outputs=2,
        domain=ORT_DOMAIN,
        activation="silu",
    )
    return y, present


@dataclass(frozen=True)
class ConvWeights:
    """Weights of a layer's convolution."""

    channels: int
    taps: ir.Value  # [C,1,K]
    bias: ir.Value | None  # [C]


def _conv_weights(graph: ModelBuilder, channels: int, kernel: int, bias: bool) -> ConvWeights:
    """Add the weights of the module conv1d; ONNX Runtime transposes them once."""
    with graph.module("conv1d"):
        taps = graph.reshape(graph.transpose(conv_taps(graph, channels, kernel), 1, 0), [channels, 1, kernel])
        return ConvWeights(channels, taps, float_tensor(graph, "bias", channels) if bias else None)


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
    conv = _conv_weights(graph, mamba.conv_dim, mamba.conv_kernel, mamba.conv_bias)

    def one() -> Mixed:
        mixed, present = _conv_step(graph, conv, channels, state[0])
        y, last, chain = _scan_step(graph, mamba, mixed, steps, state[1])
        return y, present, last, *(chain if run.verifies else ())

    def several() -> Mixed:
        mixed, present = _conv_tokens(run, conv, channels, state[0])
        y, last, chain = _scan_tokens(graph, mamba, mixed, steps, state[1], run.valid)
        return y, present, last, *(chain if run.verifies else ())

    with graph.scope("scan"):
        y, after = run.mix(one, several, channels)
    y = _gated_norm(graph, mamba, y, gate)
    return graph.linear("out_proj", y, mamba.inner, mamba.hidden_size, mamba.bias), after


def _scan_step(
    graph: ModelBuilder, mamba: Mamba2, channels: ir.Value, steps: ir.Value, state: ir.Value
) -> tuple[ir.Value, ir.Value, Mixed]:
    """Add the scan of one token's channels [B,1,C] fp32.

    steps: [B,1,heads] fp32; state: as it is bound. Each group of columns is a head of `LinearAttention`, with
    the decay of the head that it is a part of. Returns y [B,heads*P] fp32, the state, and three tensors with
    the shapes of a chain's values: no chain has one token.
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
) -> tuple[ir.Value, ir.Value, Mixed]:
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
    """Add the operator for inputs C, B, dt x, state and decays of so many heads."""
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
    conv = _conv_weights(graph, net.conv_dim, net.conv_kernel, bias=False)

    def one() -> Mixed:
        mixed, present = _conv_step(graph, conv, channels, state[0])
        y, last, chain = _delta_rule(graph, net, mixed, (b, a), state[1])
        return y, present, last, *(chain if run.verifies else ())

    def several() -> Mixed:
        mixed, present = _conv_tokens(run, conv, channels, state[0])
        y, last, chain = _delta_rule(graph, net, mixed, (b, a), state[1], run.valid)
        return y, present, last, *(chain if run.verifies else ())

    with graph.scope("delta_rule"):
        y, after = run.mix(one, several, channels)
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
    valid: ir.Value | None = None,
) -> tuple[ir.Value, ir.Value, Mixed]:
    """Add the delta rule.

    channels [B,S,q|k|v], gates b and a [B,S,heads] fp32, state as it is bound; valid [B,S,1]: None for one
    token, where each group of columns is a head of `LinearAttention`. Returns y [B,S,heads*dv] fp32, the
    state, and the values of a chain.
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


def _repeat(graph: ModelBuilder, x: ir.Value, heads: int, groups: int) -> ir.Value:
    """Repeat each value of x [B,1,heads] for its head's groups: [B,1,heads*groups]."""
    x = graph.op("Expand", graph.reshape(x, [0, 0, heads, 1]), graph.constant([1, 1, 1, groups]))
    return graph.reshape(x, [0, 0, heads * groups])


def _unit_heads(graph: ModelBuilder, net: DeltaNet, x: ir.Value) -> ir.Value:
    """Add x / sqrt(sum of squares + epsilon) of each head, x [B,S,heads*dk].

    It is an RMSNorm, whose root is of the mean of squares.
    """
    scale = graph.constant(np.full(net.key_dim, net.key_dim**-0.5), FLOAT)
    epsilon = NORM_EPSILON / net.key_dim
    x = graph.reshape(x, [0, 0, net.key_heads, net.key_dim])
    x = graph.op("RMSNormalization", x, scale, axis=-1, epsilon=epsilon, stash_type=1)
    return graph.reshape(x, [0, 0, net.keys])
