# SPDX-License-Identifier: Apache-2.0
"""Adds the blocks of a decoder to a graph for ONNX Runtime's CUDA provider."""

from __future__ import annotations

import onnx_ir as ir

from edgellm_ros.builder.graph.graph import INT64
from edgellm_ros.builder.graph.layers import Cache, ModelBuilder
from edgellm_ros.builder.graph.llm_graph import deepstack_inputs
from edgellm_ros.builder.lowering.feed_forward import feed_forward
from edgellm_ros.builder.lowering.onnxruntime.attention import attention
from edgellm_ros.builder.lowering.onnxruntime.delta_net import delta_net_cuda_layer
from edgellm_ros.builder.lowering.onnxruntime.mamba2 import mamba2_cuda_layer
from edgellm_ros.builder.lowering.onnxruntime.norms import add_norm
from edgellm_ros.builder.lowering.onnxruntime.recurrent import CudaRun
from edgellm_ros.builder.lowering.onnxruntime.step import OnnxRuntimeStep
from edgellm_ros.builder.lowering.standard.recurrent import Present, recurrent_states
from edgellm_ros.builder.model.decoder import Attention, Decoder, Residual
from edgellm_ros.builder.model.recurrent import DeltaNet, Mamba2
from edgellm_ros.engine_directory import binding_names as names


class OnnxRuntimeBlocks:
    """Adds the inputs that all blocks share, then the blocks in their order.

    A block that has a KV cache or a recurrent state reads the next one, and appends the updated one to
    `presents` or `present_states`. Values between the blocks are in the layout of the layers (`step.tokens`).
    tree, flat: see `OnnxRuntimeStep`; verifies: see `CudaRun`.
    """

    def __init__(
        self,
        graph: ModelBuilder,
        decoder: Decoder,
        capacity: int,
        *,
        tree: bool,
        flat: bool = True,
        verifies: bool = False,
        cpu: bool = False,
    ) -> None:
        self.graph, self.decoder = graph, decoder
        config = decoder.config
        self.step = OnnxRuntimeStep(
            graph, config, capacity, rope=decoder.has_rope, tree=tree, flat=flat, cpu=cpu
        )
        self.last_token_ids = graph.input(names.LAST_TOKEN_IDS, INT64, ["B", "N"])
        shape = config.num_key_value_heads, capacity, config.head_dim
        self._caches = graph.caches(range(config.num_attention_layers), *shape)
        self.deepstack = deepstack_inputs(graph, config)
        if config.recurrent is not None:
            valid_tokens, self._states = recurrent_states(graph, config.recurrent)
            step = self.step
            self._run = CudaRun(graph, config.recurrent, step.tokens, step.embeds, valid_tokens, verifies)
        self.presents: list[Cache] = []
        self.present_states: list[Present] = []

    def add_norm(self, name: str, x: ir.Value, update: ir.Value | None) -> tuple[ir.Value, ir.Value]:
        """Add x + update and its RMSNorm."""
        return add_norm(self.graph, self.decoder.norm, name, x, update, self.decoder.config.hidden_size)

    def block(self, residual: Residual, x: ir.Value) -> ir.Value:
        """Add the block alone, without its norm and the residual sum."""
        graph, block, module = self.graph, residual.block, residual.module
        if isinstance(block, Attention):
            cache = self._caches[len(self.presents)]
            y, present = attention(self.step, self.decoder, module, block, cache=cache, x=x)
            self.presents.append(present)
            return y
        if not isinstance(block, (DeltaNet, Mamba2)):
            return feed_forward(graph, module, block, x, self.decoder.config.hidden_size)
        state = self._states[len(self.present_states)]
        with graph.module(module):
            if isinstance(block, DeltaNet):
                y, last = delta_net_cuda_layer(graph, block, self._run, x, state)
            else:
                y, last = mamba2_cuda_layer(graph, block, self._run, x, state)
        self.present_states.append(last)
        return y
