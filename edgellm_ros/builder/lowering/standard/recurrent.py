# SPDX-License-Identifier: Apache-2.0
"""What recurrent layers share: inputs, chunks of tokens, the causal convolution.

A recurrent layer carries two tensors from run to run: the last inputs of its convolution and its state. The
layers are written as matrix products within chunks of tokens and over chunks, without a loop operator, so one
graph serves prompts and single tokens:

  tokens   0 1 2 ... 63 | 64 ... 127 | 128 129 (padding)      S = 130: 3 chunks of 64
  token    0                                                  S = 1: one chunk of 1

The size of a chunk does not depend on the length of a prompt, so padding does not change the sums of a token.
The state after a run is the state after the last valid token of each sequence: padding has no effect.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.graph.graph import FLOAT, INT64
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.engine_directory import binding_names as names
from edgellm_ros.engine_directory.recurrent_config import CHAIN_TOKENS, RecurrentConfig, state_columns

CHUNK = 64  # tokens
MASKED = -1e9  # a logarithm whose exponential is 0

State = tuple[ir.Value, ir.Value]  # of one layer, fp32: convolution [B,C,K-1], state [B,groups,dk,columns]


@dataclass(frozen=True)
class ChainValues:
    """The values [B,T,...] by which T tokens update a layer's state: `ChainInputs`."""

    conv_inputs: ir.Value  # channels
    keys: ir.Value  # key heads * dk
    values: ir.Value  # heads * dv
    decays: ir.Value  # heads
    strengths: ir.Value | None = None  # heads; None for Mamba2


Present = tuple[State, ChainValues | None]  # after a run; None in graphs that verify no chains


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """A run's tokens as N chunks of Q tokens; made once for all layers of a graph."""

    graph: ModelBuilder
    tokens: ir.Value  # [1] i64: S
    count: ir.Value  # [1] i64: N
    size: ir.Value  # [1] i64: Q, CHUNK or 1
    valid_tokens: ir.Value  # [B] i64
    index: ir.Value  # [N*Q] i64: the token at each position; padding repeats the last one
    valid: ir.Value  # [B,N*Q,1] fp32: 1 for a sequence's tokens, 0 for padding
    causal: ir.Value  # [Q,Q] bool: true where token i follows token j or is the same
    verifies: bool = False  # whether the layers return `ChainValues`
    kept_inputs: dict[int, ir.Value] = field(default_factory=dict)
    shapes: dict[tuple[int, ...], ir.Value] = field(default_factory=dict)
    shared: dict[str, list[ir.Value]] = field(default_factory=dict)  # what all layers of a kind use

    def split(self, x: ir.Value, *sizes: int) -> ir.Value:
        """Convert [B,N*Q,product of sizes] to [B,N,Q,*sizes]."""
        graph = self.graph
        if sizes not in self.shapes:
            with graph.scope("chunks"):
                parts = graph.constant([0]), self.count, self.size, graph.constant(sizes)
                self.shapes[sizes] = graph.op("Concat", *parts, axis=0)
        return graph.op("Reshape", x, self.shapes[sizes])

    def last_of_heads(self, heads: int) -> ir.Value:
        """Return the index of each head's last chunk with tokens, or of its first chunk.

        The indices [B,heads] are into B*heads*N.
        """
        graph, key = self.graph, f"last_of_{heads}_heads"
        if key not in self.shared:
            constant, op = graph.constant, graph.op
            with graph.scope("chunks"):
                full = op("Div", op("Add", self.valid_tokens, op("Sub", self.size, constant([1]))), self.size)
                last = op("Max", op("Sub", full, constant([1])), constant([0]))
                rows = op("Mul", op("Shape", self.valid_tokens), constant([heads]))
                first = op("Mul", _numbers(graph, rows), self.count)
                first = graph.reshape(first, [-1, heads])
                self.shared[key] = [op("Add", first, op("Unsqueeze", last, constant([1])))]
        return self.shared[key][0]

    def first(self, x: ir.Value) -> ir.Value:
        """Cut the first tokens of a run, as many as a chain may have.

        x [B,S or more,...] -> [B,T,...].
        """
        graph, key = self.graph, "chain"
        if key not in self.shared:
            with graph.scope("chunks"):
                self.shared[key] = [graph.op("Min", self.tokens, graph.constant([CHAIN_TOKENS]))]
        return graph.op("Slice", x, graph.constant([0]), self.shared[key][0], graph.constant([1]))

    def pad(self, x: ir.Value) -> ir.Value:
        """Convert [B,S,...] to [B,N*Q,...]: padding repeats the last token."""
        return self.graph.op("Gather", x, self.index, axis=1)

    def cut(self, x: ir.Value) -> ir.Value:
        """Convert [B,N*Q,...] to [B,S,...]."""
        constant = self.graph.constant
        return self.graph.op("Slice", x, constant([0]), self.tokens, constant([1]))


def recurrent_inputs(
    graph: ModelBuilder, config: RecurrentConfig, embeds: ir.Value, verifies: bool = False
) -> tuple[Chunks, list[State]]:
    """Add recurrent layers' inputs (`recurrent_states`) and chunks of their tokens."""
    valid_tokens, states = recurrent_states(graph, config)
    return make_chunks(graph, embeds, valid_tokens, verifies), states


def recurrent_states(graph: ModelBuilder, config: RecurrentConfig) -> tuple[ir.Value, list[State]]:
    """Add the inputs of recurrent layers; returns `valid_tokens` and the states.

    - valid_tokens [B] i64: tokens of each sequence in this run; those after them are padding
    - conv_state_i [B,C,K-1] fp32: the last inputs of the convolution of recurrent layer i
    - recurrent_state_i [B,groups,dk,columns] fp32, see `RecurrentConfig.state_shape`
    """
    valid_tokens = graph.input(names.VALID_TOKENS, INT64, ["B"])
    states = [
        (
            graph.input(names.conv_state(i), FLOAT, ["B", *config.conv_shape]),
            graph.input(names.recurrent_state(i), FLOAT, ["B", *config.state_shape]),
        )
        for i in range(config.num_layers)
    ]
    return valid_tokens, states


def recurrent_outputs(graph: ModelBuilder, config: RecurrentConfig, presents: list[Present]) -> None:
    """Add recurrent layers' outputs: states after the run, and the values of a chain."""
    for i, ((conv, state), chain) in enumerate(presents):
        graph.output(conv, names.present_conv_state(i), FLOAT, ["B", *config.conv_shape])
        graph.output(state, names.present_recurrent_state(i), FLOAT, ["B", *config.state_shape])
        if chain is not None:
            for name, value in vars(chain).items():
                if value is not None:
                    width = config.chain_widths[name]
                    graph.output(value, names.chain_value(name, i), FLOAT, ["B", "T", width])


def join_columns(graph: ModelBuilder, state: ir.Value, heads: int, key_dim: int, value_dim: int) -> ir.Value:
    """Convert a state [B,groups,dk,columns] to [B,heads,dk,dv]."""
    columns = state_columns(value_dim)
    if columns == value_dim:
        return state
    state = graph.reshape(state, [0, heads, value_dim // columns, key_dim, columns])
    return graph.reshape(graph.transpose(state, (0, 1, 3, 2, 4)), [0, heads, key_dim, value_dim])


def cut_columns(graph: ModelBuilder, state: ir.Value, heads: int, key_dim: int, value_dim: int) -> ir.Value:
    """Convert a state [B,heads,dk,dv] to [B,groups,dk,columns]."""
    columns = state_columns(value_dim)
    if columns == value_dim:
        return state
    state = graph.reshape(state, [0, heads, key_dim, value_dim // columns, columns])
    state = graph.transpose(state, (0, 1, 3, 2, 4))
    return graph.reshape(state, [0, heads * value_dim // columns, key_dim, columns])


def make_chunks(
    graph: ModelBuilder, embeds: ir.Value, valid_tokens: ir.Value, verifies: bool = False
) -> Chunks:
    """Add the nodes that cut S tokens into chunks.

    embeds: [B,S,H]; valid_tokens: [B] i64.
    """
    constant, op = graph.constant, graph.op
    with graph.scope("chunks"):
        tokens = op("Shape", embeds, start=1, end=2)
        longer = op("Mul", op("Sub", tokens, constant([1])), constant([CHUNK]))  # 0 for one token
        size = op("Min", op("Add", longer, constant([1])), constant([CHUNK]))
        count = op("Div", op("Add", tokens, op("Sub", size, constant([1]))), size)
        places = _numbers(graph, op("Mul", count, size))
        index = op("Min", places, op("Sub", tokens, constant([1])))
        # The padding after S must not count even if valid_tokens is S: positions are compared, not the index.
        valid = op(
            "Less", op("Unsqueeze", places, constant([0])), op("Unsqueeze", valid_tokens, constant([1]))
        )
        valid = op("Unsqueeze", op("Cast", valid, to=int(FLOAT)), constant([2]))
        causal = lower_triangle(graph, size)
    return Chunks(
        graph=graph,
        tokens=tokens,
        count=count,
        size=size,
        valid_tokens=valid_tokens,
        index=index,
        valid=valid,
        causal=causal,
        verifies=verifies,
    )


def lower_triangle(graph: ModelBuilder, size: ir.Value) -> ir.Value:
    """Add a mask [n,n] bool with true on and below the diagonal; size [1] i64: n."""
    numbers = _numbers(graph, size)
    rows, columns = (graph.op("Unsqueeze", numbers, graph.constant([axis])) for axis in (1, 0))
    return graph.op("GreaterOrEqual", rows, columns)


def decays(graph: ModelBuilder, logs: ir.Value, mask: ir.Value) -> ir.Value:
    """Add exp(logs[i] - logs[j]) where the mask is true, 0 elsewhere.

    logs [...,n], mask [n,n] -> [...,n,n]. logs: cumulative sums of logarithms of decays, so that every
    exponent is at most 0.
    """
    rows, columns = (graph.op("Unsqueeze", logs, graph.constant([axis])) for axis in (-1, -2))
    exponents = graph.op("Where", mask, graph.op("Sub", rows, columns), graph.constant(MASKED, FLOAT))
    return graph.op("Exp", exponents)


def float_tensor(graph: ModelBuilder, name: str, *shape: int) -> ir.Value:
    """Add the tensor `name` of the current module in fp32, in every precision."""
    full = graph.full_name(name)
    graph.weights.require(full, shape)
    return graph.weight(full, shape, lambda: graph.weights.read(full), dtype=FLOAT)


def negative_exponential(graph: ModelBuilder, name: str, size: int) -> ir.Value:
    """Add -exp(tensor) of a tensor [size] of the current module, in fp32."""
    full = graph.full_name(name)
    graph.weights.require(full, (size,))
    read = graph.weights.read
    return graph.weight(
        f"{full}.negative_exp", (size,), lambda: -np.exp(read(full).astype(np.float32)), FLOAT
    )


def silu(graph: ModelBuilder, x: ir.Value) -> ir.Value:
    """Add x * sigmoid(x)."""
    return graph.op("Mul", x, graph.op("Sigmoid", x))


def softplus(graph: ModelBuilder, x: ir.Value) -> ir.Value:
    """Add log(1 + exp(x)) = max(x, 0) + 2 atanh(e / (2 + e)), with e = exp(-|x|).

    On a CPU, ONNX Runtime's Softplus and Log are vectorised, and the remainder of a tensor, or of a thread's
    share of it, gets other last bits, which would depend on the batch. The operators here give the same bits
    everywhere.
    """
    op, two = graph.op, graph.constant(2.0, FLOAT)
    e = op("Exp", op("Neg", op("Abs", x)))
    logarithm = op("Mul", op("Atanh", op("Div", e, op("Add", e, two))), two)
    return op("Add", op("Relu", x), logarithm)


def conv_taps(graph: ModelBuilder, channels: int, kernel: int) -> ir.Value:
    """Add the convolution's weights [kernel,channels] of the current module, in fp32."""
    full = graph.full_name("weight")
    graph.weights.require(full, (channels, 1, kernel))
    read = graph.weights.read
    return graph.weight(full, (kernel, channels), lambda: read(full).reshape(channels, kernel).T, dtype=FLOAT)


# state --+
# x ----- Concat --+-- Slice 0 -- Mul --+
#                  +-- ...              +-- Add (bias) -- SiLU -->
#                  +-- Slice K-1 - Mul -+
#                  +-- GatherElements -- present state
def causal_conv(
    graph: ModelBuilder,
    name: str,
    chunks: Chunks,
    *,
    x: ir.Value,
    state: ir.Value,
    shape: tuple[int, int],
    bias: bool,
) -> tuple[ir.Value, ir.Value]:
    """Add a causal convolution of each channel, and SiLU.

    x [B,S,C]; state [B,C,K-1]: the inputs before x; shape (C, K-1). Returns [B,S,C] and the state after the
    last valid token. All are fp32. Products of shifted inputs: the sums of a token do not depend on S.
    """
    channels, past = shape
    op, constant = graph.op, graph.constant
    with graph.module(name):
        taps = conv_taps(graph, channels, past + 1)
        window = op("Concat", graph.transpose(state, (0, 2, 1)), x, axis=1)
        index = op("Expand", _kept_inputs(chunks, past), constant([1, 1, channels]))
        present = graph.transpose(op("GatherElements", window, index, axis=1), (0, 2, 1))
        total = float_tensor(graph, "bias", channels) if bias else None
        for tap in range(past + 1):
            end = chunks.tokens if tap == 0 else op("Add", chunks.tokens, constant([tap]))
            shifted = op("Slice", window, constant([tap]), end, constant([1]))
            term = op("Mul", shifted, op("Gather", taps, constant(tap), axis=0))
            total = term if total is None else op("Add", total, term)
        assert total is not None
        return silu(graph, total), present


def _kept_inputs(chunks: Chunks, past: int) -> ir.Value:
    """Return the indices [B,past,1] of the last inputs of each sequence in [state, x]."""
    graph = chunks.graph
    if past not in chunks.kept_inputs:
        with graph.scope("chunks"):
            valid = graph.op("Unsqueeze", chunks.valid_tokens, graph.constant([1]))
            places = graph.op("Add", valid, graph.constant([list(range(past))]))
            chunks.kept_inputs[past] = graph.op("Unsqueeze", places, graph.constant([2]))
    return chunks.kept_inputs[past]


def _numbers(graph: ModelBuilder, count: ir.Value) -> ir.Value:
    """Add [0, 1, ..., n-1] i64; count [1] i64: n."""
    scalar = graph.op("Squeeze", count, graph.constant([0]))
    return graph.op("Range", graph.constant(0), scalar, graph.constant(1))
