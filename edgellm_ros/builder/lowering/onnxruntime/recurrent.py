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

For prompts of gated delta nets, GatedDeltaNet takes the place of LinearAttention where it has tensor cores
(delta_net.py): a scan of 366 tokens of Qwen3.5-0.8B takes 0.73 ms in LinearAttention, which goes from token
to token, and 0.15 ms in chunks (H200). GatedDeltaNet multiplies fp16: unit keys and strengths below 1 keep a
delta net in its range, but nothing bounds B, C and the state of Mamba2.

No branch has such a Split, a Concat of tensors, or a value that the host computes from shapes and copies to
the GPU, so decode steps and verifications of drafted tokens can be recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.graph.graph import BOOL, FLOAT, ORT_DOMAIN
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.graph.token_layout import TokenLayout
from edgellm_ros.builder.lowering.standard.recurrent import (
    ChainValues,
    Present,
    State,
    conv_taps,
    float_tensor,
)
from edgellm_ros.engine_directory.language_model_config import LanguageModelConfig
from edgellm_ros.engine_directory.recurrent_config import (
    CHAIN_TOKENS,
    RecurrentConfig,
)

DECODE_KEY_DIMS = (64, 128, 256)  # LinearAttention's kernels for few tokens take any d_v with these d_k
SHARED_BYTES = 48 * 1024  # smem of a CTA on every GPU; the kernel for other d_k has a head's state there
MAX_THREADS = 1024  # of a CTA; that kernel has at least one per row and per column of the state
MAX_HEAD_DIM = 256  # of attention
MAX_PARTS = 4  # of unequal sizes, along the last axis, that Split cuts without copies from host memory

# What a layer computes between its convolution and its norm, in fp32: of convolved channels [B,S,C] and the
# state it makes y [B*S,...] or [B,S,...], the next state, and a chain's keys, values, decays and strengths.
Scanned = tuple[ir.Value, ir.Value, tuple[ir.Value, ...]]
Scan = Callable[[ir.Value, ir.Value], Scanned]


def has_kernels(config: LanguageModelConfig) -> bool:
    """Return whether CUDA kernels take the sizes of a decoder's heads, on every GPU.

    True without recurrent layers. The limits are those in the sources of LinearAttention for one token and of
    GroupQueryAttention (linear_attention_impl.cu, group_query_attention_helper.h).
    """
    if config.recurrent is None:
        return True
    key_dim, value_dim = config.recurrent.key_dim, config.recurrent.value_dim
    longest = max(key_dim, value_dim)
    state = (key_dim * value_dim + key_dim + longest) * 4
    recurrent = key_dim in DECODE_KEY_DIMS or (state <= SHARED_BYTES and longest <= MAX_THREADS)
    return recurrent and config.head_dim % 8 == 0 and config.head_dim <= MAX_HEAD_DIM


def cut(graph: ModelBuilder, x: ir.Value, sizes: Sequence[int]) -> Sequence[ir.Value]:
    """Cut the last axis into at most four parts.

    ONNX Runtime splits these with one kernel, without copies from host memory.
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
                # Token numbers computed from the shape alone would be computed on the host.
                any_value = op("Slice", embeds, constant([0]), constant([1]), constant([2]))
                any_value = op("Cast", op("Squeeze", any_value, constant([2])), to=int(BOOL))
                ones = op("Cast", op("Equal", any_value, any_value), to=int(FLOAT))
                # CumSum's axis is read on the host. A constant that nodes on the GPU share would be on the
                # GPU and be copied to the host in each run, which a CUDA graph cannot record.
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
        self, conv: ConvWeights, channels: ir.Value, state: State, *, one: Scan, several: Scan
    ) -> tuple[ir.Value, Present]:
        """Add a layer's convolution and scan, for one token and for several.

        channels: [B,S,C] fp32. Returns y as the scans return it, and the states after the run.
        """

        def branch(convolve: Callable[..., tuple[ir.Value, ir.Value]], scan: Scan) -> list[ir.Value]:
            mixed, present = convolve(self, conv, channels, state[0])
            y, last, chain = scan(mixed, state[1])
            return [y, present, last, *(chain if self.verifies else ())]

        y, conv_state, last, *parts = self.graph.either(
            self._single,
            lambda: branch(conv_step, one),
            lambda: branch(conv_tokens, several),
            (FLOAT,) * (3 + self._chain_parts),
        )
        if not self.verifies:
            return y, ((conv_state, last), None)
        return y, ((conv_state, last), ChainValues(*map(self._first, (channels, *parts))))

    def _first(self, x: ir.Value) -> ir.Value:
        """Cut the first tokens of a run: [B,S,...] to [B,T,...]."""
        constant = self.graph.constant
        return self.graph.op("Slice", x, constant([0]), constant([CHAIN_TOKENS]), constant([1]))


# state -- CausalConvWithState -- present state
# x ----------+         +-- y -->
def conv_step(run: CudaRun, conv: ConvWeights, x: ir.Value, state: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Add the convolution of one token and SiLU in fp32.

    x [B,1,C], state [B,C,K-1] -> y [B,1,C], state.
    """
    graph = run.graph
    y, present = _conv(graph, conv, graph.reshape(x, [-1, conv.channels, 1]), state)
    return graph.reshape(y, [-1, 1, conv.channels]), present


def conv_tokens(run: CudaRun, conv: ConvWeights, x: ir.Value, state: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Add `conv_step` for x [B,S,C].

    The state after it has the last valid inputs of each sequence.
    """
    graph, op = run.graph, run.graph.op
    x, channels = graph.transpose(x, (0, 2, 1)), graph.constant([1, conv.channels, 1])
    y, _ = _conv(graph, conv, x, state)
    old = op("GatherElements", state, op("Expand", run.old_inputs, channels), axis=2)
    new = op("GatherElements", x, op("Expand", run.new_inputs, channels), axis=2)
    return graph.transpose(y, (0, 2, 1)), op("Where", run.is_old, old, new)


def _conv(graph: ModelBuilder, conv: ConvWeights, x: ir.Value, state: ir.Value) -> tuple[ir.Value, ir.Value]:
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


def conv_weights(graph: ModelBuilder, channels: int, kernel: int, bias: bool) -> ConvWeights:
    """Add the weights of the module conv1d; ONNX Runtime transposes them once."""
    with graph.module("conv1d"):
        taps = graph.reshape(
            graph.transpose(conv_taps(graph, channels, kernel), (1, 0)), [channels, 1, kernel]
        )
        return ConvWeights(channels, taps, float_tensor(graph, "bias", channels) if bias else None)
