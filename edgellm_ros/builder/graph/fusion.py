# SPDX-License-Identifier: Apache-2.0
"""A draft head's part in the base's graph: the states that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import onnx_ir as ir

from edgellm_ros.builder.graph.graph import DTYPES
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.graph.token_layout import TokenLayout
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine_directory import binding_names as names

FLOAT16_MAX = 65504.0
HEAD_MODULE = "draft"  # the head's tensors are in this module


class HeadStates(Protocol):
    """States of all tokens that a draft head takes."""

    @property
    def hidden_size(self) -> int:
        """Size Hd of a state."""
        ...

    def needs_last(self, layers: int) -> bool:
        """Tell whether the last of `layers` layers must compute the rows of all tokens."""
        ...

    def add_output(
        self, graph: ModelBuilder, tokens: TokenLayout, layer_inputs: Sequence[ir.Value], last: ir.Value
    ) -> None:
        """Make the states [B,S,Hd] an output.

        layer_inputs: in the layout of the layers, the last is the output of the last layer; last [B,S,H]:
        after the last norm.
        """
        ...


@dataclass(frozen=True)
class LastStates:
    """The states after the base's last norm, which an MTP head takes."""

    hidden_size: int

    def needs_last(self, layers: int) -> bool:
        return True

    def add_output(
        self, graph: ModelBuilder, tokens: TokenLayout, layer_inputs: Sequence[ir.Value], last: ir.Value
    ) -> None:
        graph.output(last, names.FUSED_HIDDEN_STATES, graph.dtype, ["B", "S", self.hidden_size])


@dataclass(frozen=True)
class Fusion:
    """The fusion of three of the base's states, which an EAGLE-3 head takes.

    The states are those of the residual stream at the input of decoder layers, deepstack rows included.
    """

    weights: Weights  # of the head
    base_state_layers: tuple[int, ...]  # whose inputs; the number of layers is the output of the last
    base_hidden_size: int
    hidden_size: int  # of the head
    epsilon: float
    bias: bool  # of fc
    state_norms: bool  # an RMSNorm of each state
    joined_norm: bool  # an RMSNorm of all states side by side

    def needs_last(self, layers: int) -> bool:
        return layers in self.base_state_layers

    def add_output(
        self, graph: ModelBuilder, tokens: TokenLayout, layer_inputs: Sequence[ir.Value], last: ir.Value
    ) -> None:
        states = [layer_inputs[layer] for layer in self.base_state_layers]
        fused = tokens.unflatten(self._fuse(graph, states), self.hidden_size)
        graph.output(fused, names.FUSED_HIDDEN_STATES, graph.dtype, ["B", "S", self.hidden_size])

    # low --+ (fc_norm.0)
    # mid --+ (fc_norm.1) -- Concat -- (input_norm) -- fc -- Clip -->
    # high -+ (fc_norm.2)
    def _fuse(self, graph: ModelBuilder, states: Sequence[ir.Value]) -> ir.Value:
        size = self.base_hidden_size
        with graph.tensors_of(self.weights), graph.module(HEAD_MODULE):
            if self.state_norms:
                states = [
                    graph.rms_norm(f"fc_norm.{i}", state, size, self.epsilon)
                    for i, state in enumerate(states)
                ]
            joined = graph.op("Concat", *states, axis=-1)
            size *= len(states)
            if self.joined_norm:
                joined = graph.rms_norm("input_norm", joined, size, self.epsilon)
            return clipped(graph, graph.linear("fc", joined, size, self.hidden_size, self.bias))


def clipped(graph: ModelBuilder, fused: ir.Value) -> ir.Value:
    """Bound the result of `fc` in fp16.

    States of the first token of a text can be so large that fc's sum is infinite in fp16, and its keys and
    values would then be NaN for all tokens after it.
    """
    if graph.dtype != DTYPES["fp16"]:
        return fused
    limits = (graph.constant(limit, graph.dtype) for limit in (-FLOAT16_MAX, FLOAT16_MAX))
    return graph.op("Clip", fused, *limits)
