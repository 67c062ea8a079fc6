# SPDX-License-Identifier: Apache-2.0
"""Inputs and outputs that the language model graphs of all families share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from edgellm_ros.builder.graph.graph import BOOL, FLOAT, INT32, INT64, Dim
from edgellm_ros.builder.graph.layers import Cache, ModelBuilder
from edgellm_ros.builder.graph.lm_head import LMHead
from edgellm_ros.builder.graph.token_layout import TokenLayout
from edgellm_ros.engine_directory import binding_names as names
from edgellm_ros.engine_directory.language_model_config import LanguageModelConfig


@dataclass(frozen=True, kw_only=True)
class LLMInputs:
    """Inputs of `llm/model.onnx`, and the layout of the tokens between its layers."""

    embeds: ir.Value  # [B,S,H]
    cos_sin: tuple[ir.Value, ...]  # [B,S,R/2] each, in the graph's dtype; empty without RoPE
    write_index: ir.Value  # [B] i64
    mask: ir.Value  # [B,1,S,C] bool
    last_token_ids: ir.Value  # [B,N] i64
    tokens: TokenLayout
    caches: list[Cache]  # of each layer, [B,Hkv,C,D]
    deepstack: list[ir.Value]  # [B,S,H] each
    capacity: int  # C
    _masks: dict[int, ir.Value] = field(default_factory=dict)  # of sliding windows

    def windowed_mask(self, graph: ModelBuilder, window: int | None) -> ir.Value:
        """Return the mask [B,1,S,C] of layers with a sliding window.

        window: None is the mask as it is.
        """
        if window is None:
            return self.mask
        if window not in self._masks:
            with graph.scope(f"window_{window}"):
                self._masks[window] = windowed(graph, self.mask, window, self.capacity)
        return self._masks[window]


# mask -- Cast -- ReduceSum -- position + 1 --+
#   |                   slot + window -- GreaterOrEqual -- And -->
#   +-------------------------------------------------------+
def windowed(graph: ModelBuilder, mask: ir.Value, window: int, capacity: int) -> ir.Value:
    """Add the mask of layers with a sliding window to a mask [B,1,S,C].

    A token attends to all tokens before it, so the number of slots that the mask shows to it is its
    position + 1. The window is exact for committed rows, whose slot is their position. The slot of a drafted
    row of a tree is its position or a later one: a drafted row is not hidden as long as the window is longer
    than the tree is deep.
    """
    shown = graph.op("Cast", mask, to=int(INT32))
    ends = graph.op("ReduceSum", shown, graph.constant([-1]), keepdims=1)
    slots = graph.constant(np.arange(capacity) + window, INT32)
    return graph.op("And", mask, graph.op("GreaterOrEqual", slots, ends))


def llm_inputs(
    graph: ModelBuilder, config: LanguageModelConfig, capacity: int, rope: bool = True
) -> LLMInputs:
    """Add the inputs of `llm/model.onnx`.

    Tokens are laid out flat if the graph has LoRA inputs. rope: whether any layer has RoPE.
    """
    embeds = graph.input(names.INPUTS_EMBEDS, graph.dtype, ["B", "S", config.hidden_size])
    cos_sin = graph.rope_rows("S", config.rope.rotary_dim // 2) if rope else ()
    write_index = graph.input(names.KV_WRITE_INDEX, INT64, ["B"])
    mask = graph.input(names.ATTENTION_MASK, BOOL, ["B", 1, "S", capacity])
    last_token_ids = graph.input(names.LAST_TOKEN_IDS, INT64, ["B", "N"])
    tokens = TokenLayout(graph, graph.op("Shape", write_index) if graph.lora else None, inferred=(-1,))
    layers = range(config.num_attention_layers)
    caches = graph.caches(layers, config.num_key_value_heads, capacity, config.head_dim)
    deepstack = deepstack_inputs(graph, config)
    return LLMInputs(
        embeds=embeds,
        cos_sin=cos_sin,
        write_index=write_index,
        mask=mask,
        last_token_ids=last_token_ids,
        tokens=tokens,
        caches=caches,
        deepstack=deepstack,
        capacity=capacity,
    )


def deepstack_inputs(graph: ModelBuilder, config: LanguageModelConfig) -> list[ir.Value]:
    """Add inputs for deepstack features, [B,S,H] each in the graph's dtype."""
    return [
        graph.input(names.deepstack_embeds(i), graph.dtype, ["B", "S", config.hidden_size])
        for i in range(config.num_deepstack_features)
    ]


def llm_outputs(
    graph: ModelBuilder,
    config: LanguageModelConfig,
    *,
    capacity: int,
    head: LMHead,
    logits: ir.Value,
    presents: Sequence[Cache],
    hidden_states: Mapping[int, ir.Value],
    logits_type: ir.DataType = FLOAT,
) -> None:
    """Add the outputs of a language model.

    logits [B,N,V]; presents: updated caches of each layer [B,Hkv,C,D]; hidden_states: layer from 1 ->
    [B,S,H].
    """
    graph.output(logits, names.LOGITS, logits_type, ["B", "N", head.output_vocab_size])
    for i, (key, value) in enumerate(presents):
        shape: list[Dim] = ["B", config.num_key_value_heads, capacity, config.head_dim]
        graph.output(key, names.present_key(i), graph.cache_dtype, shape)
        graph.output(value, names.present_value(i), graph.cache_dtype, shape)
    for i, value in hidden_states.items():
        graph.output(value, names.hidden_states(i), graph.dtype, ["B", "S", config.hidden_size])
