# SPDX-License-Identifier: Apache-2.0
"""Adds the blocks of a decoder to a graph of ONNX's operators."""

from __future__ import annotations

import onnx_ir as ir

from edgellm_ros.builder.graph.layers import Cache, ModelBuilder
from edgellm_ros.builder.graph.llm_graph import LLMInputs, llm_inputs
from edgellm_ros.builder.lowering.feed_forward import feed_forward
from edgellm_ros.builder.lowering.norms import rms_norm
from edgellm_ros.builder.lowering.standard.attention import attention
from edgellm_ros.builder.lowering.standard.delta_net import delta_net_layer
from edgellm_ros.builder.lowering.standard.mamba2 import mamba2_layer
from edgellm_ros.builder.lowering.standard.recurrent import Present, recurrent_inputs
from edgellm_ros.builder.model.decoder import Attention, Decoder, Residual
from edgellm_ros.builder.model.recurrent import DeltaNet, Mamba2


class StandardBlocks:
    """Adds the inputs that all blocks share, then the blocks in their order.

    A block that has a KV cache or a recurrent state reads the next one, and appends the updated one to
    `presents` or `present_states`. Values between blocks have the layout of the layers (`inputs.tokens`).
    inputs: those of a graph that has others than `llm_inputs`; without recurrent layers.
    """

    def __init__(
        self,
        graph: ModelBuilder,
        decoder: Decoder,
        capacity: int,
        *,
        verifies: bool = False,
        inputs: LLMInputs | None = None,
    ) -> None:
        self.graph, self.decoder = graph, decoder
        config = decoder.config
        self.inputs = inputs or llm_inputs(graph, config, capacity, rope=decoder.has_rope)
        if config.recurrent is not None:
            self._chunks, self._states = recurrent_inputs(
                graph, config.recurrent, self.inputs.embeds, verifies
            )
        self.presents: list[Cache] = []
        self.present_states: list[Present] = []

    def add(self, residual: Residual, x: ir.Value) -> ir.Value:
        """Add x + block(norm(x))."""
        return self.graph.op("Add", x, self.block(residual, self.norm(residual.norm, x)))

    def norm(self, name: str, x: ir.Value) -> ir.Value:
        """Add an RMSNorm of the decoder over the last axis."""
        return rms_norm(self.graph, self.decoder.norm, name, x, self.decoder.config.hidden_size)

    def block(self, residual: Residual, x: ir.Value) -> ir.Value:
        """Add the block alone, without its norm and the residual sum."""
        graph, inputs, block, module = self.graph, self.inputs, residual.block, residual.module
        if isinstance(block, Attention):
            cache = inputs.caches[len(self.presents)]
            y, present = attention(graph, self.decoder, module, block, inputs=inputs, cache=cache, x=x)
            self.presents.append(present)
            return y
        if not isinstance(block, (DeltaNet, Mamba2)):
            return feed_forward(graph, module, block, x, self.decoder.config.hidden_size)
        tokens, state = inputs.tokens, self._states[len(self.present_states)]
        with graph.module(module):
            if isinstance(block, DeltaNet):
                y, last = delta_net_layer(
                    graph,
                    block,
                    tokens=tokens,
                    chunks=self._chunks,
                    x=x,
                    state=state,
                    max_tokens=inputs.capacity,
                )
            else:
                y, last = mamba2_layer(graph, block, tokens, self._chunks, x, state)
        self.present_states.append(last)
        return y
