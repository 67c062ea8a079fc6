# SPDX-License-Identifier: Apache-2.0
"""What layers for ONNX Runtime alone share: positions, lengths, masks."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.graph.graph import BOOL, FLOAT, INT32, INT64
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.graph.llm_graph import windowed
from edgellm_ros.builder.graph.token_layout import TokenLayout
from edgellm_ros.engine_directory import binding_names as names
from edgellm_ros.engine_directory.language_model_config import LanguageModelConfig

HIDDEN = -65504.0  # bias of the score of a row that a token must not attend to; finite in every type


class OnnxRuntimeStep:
    """Values that all layers share: positions, lengths and the layout of tokens.

    `rope`: cos, sin and position ids; empty without RoPE. `last_row` and `longest` are lengths as
    GroupQueryAttention takes them, `write_index` as TensorScatter does. `tree`: the mask of a tree of tokens,
    an input. `flat`: whether the layout of the layers is flat (`TokenLayout`). `cpu`: whether the graph is
    for the CPU provider. `has_kernel`: whether attention is GroupQueryAttention, which CUDA lacks in fp32.
    """

    def __init__(
        self,
        graph: ModelBuilder,
        config: LanguageModelConfig,
        capacity: int,
        rope: bool = True,
        tree: bool = False,
        flat: bool = True,
        cpu: bool = False,
    ) -> None:
        self.graph, self.config = graph, config
        self.embeds = graph.input(names.INPUTS_EMBEDS, graph.dtype, ["B", "S", config.hidden_size])
        with graph.scope("tokens"):
            sizes = graph.op("Shape", self.embeds, start=0, end=2) if flat else None
            self.tokens = TokenLayout(graph, sizes)
        self.rope: tuple[ir.Value, ...] = ()
        if rope:
            position_ids = graph.input(names.POSITION_IDS, INT64, ["B", "S"])
            tables = [
                graph.input(name, FLOAT, ["P", config.rope.rotary_dim // 2])
                for name in (names.ROPE_COS, names.ROPE_SIN)
            ]
            with graph.scope("rope"):
                self.rope = *map(graph.from_fp32, tables), position_ids
        self.kv_length = graph.input(names.KV_LENGTH, INT64, ["B"])
        self.cpu = cpu
        self.has_kernel = cpu or graph.dtype != FLOAT
        if not self.has_kernel:
            self.write_index = graph.input(names.KV_WRITE_INDEX, INT64, ["B"])
        else:
            with graph.scope("lengths"):
                last = graph.op("Sub", self.kv_length, graph.constant(1))
                self.last_row = graph.op("Cast", last, to=int(INT32))
            self.longest = graph.constant(capacity, INT32) if tree else self._longest(capacity)
        self.tree = graph.input(names.ATTENTION_MASK, BOOL, ["B", 1, "S", capacity]) if tree else None
        self.capacity = capacity
        self._masks: dict[int, ir.Value] = {}
        self._biases: dict[int | None, ir.Value] = {}

    def _longest(self, capacity: int) -> ir.Value:
        """Return the bound of all lengths, [1] i32, for GroupQueryAttention.

        It is read on the host, where the lengths are not known, so it is the capacity. But then ONNX Runtime
        takes several tokens of one sequence only. It takes those of several sequences if the bound is their
        number of tokens, which says that nothing is cached. No other run has several of both, so the shape
        tells, which the host knows.
        """
        graph, op = self.graph, self.graph.op
        with graph.scope("lengths"):
            sequences, tokens = (op("Shape", self.embeds, start=i, end=i + 1) for i in (0, 1))
            are_prompts = op("Greater", op("Min", sequences, tokens), graph.constant([1]))
            return op("Cast", op("Where", are_prompts, tokens, graph.constant([capacity])), to=int(INT32))

    def bias(self, window: int | None) -> ir.Value:
        """Return the mask of a tree as a bias of scores [B,1,S,C].

        One tensor is made for all layers.
        """
        graph, mask = self.graph, self.tree if window is None else self.windowed_mask(window)
        if window not in self._biases:
            with graph.scope("bias"):
                shown, hidden = (graph.constant(value, graph.dtype) for value in (0, HIDDEN))
                self._biases[window] = graph.op("Where", mask, shown, hidden)
        return self._biases[window]

    def windowed_mask(self, window: int) -> ir.Value:
        """Return the mask [B,1,S,C] of a sliding window, for `Attention`.

        One tensor is made for all layers. Nothing of the mask is computed from a number on the host: such a
        number would be copied to the device in each run, and a CUDA graph copies it from memory that other
        runs have overwritten.
        """
        if window not in self._masks:
            graph = self.graph
            with graph.scope(f"window_{window}"):
                if self.tree is not None:
                    self._masks[window] = windowed(graph, self.tree, window, self.capacity)
                    return self._masks[window]
                slots = graph.constant(np.arange(self.capacity))
                tokens = graph.op("Squeeze", graph.op("Shape", self.embeds, start=1, end=2))
                rows = graph.op("Range", graph.constant(0), tokens, graph.constant(1))
                first = graph.reshape(self.write_index, [-1, 1, 1, 1])
                last = graph.op("Add", first, graph.reshape(rows, [-1, 1]))
                after = graph.op("Greater", graph.op("Add", slots, graph.constant(window)), last)
                seen = graph.op("LessOrEqual", slots, last)
                self._masks[window] = graph.op("And", seen, after)
        return self._masks[window]
