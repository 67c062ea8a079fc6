# SPDX-License-Identifier: Apache-2.0
"""Options of the graphs of a language model."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm_ros.builder.graph.fusion import HeadStates
from edgellm_ros.builder.graph.lm_head import LMHead


@dataclass(frozen=True)
class LLMOptions:
    """Options of a language model's graph."""

    precision: str  # type of weights, activations and, unless `kv_cache` says otherwise, KV cache
    capacity: int  # rows of the KV cache per sequence
    head: LMHead
    lora: bool = False  # with LoRA inputs
    hidden_state_layers: tuple[int, ...] = ()  # layers (from 1) whose hidden states become outputs
    head_states: HeadStates | None = None  # for a draft head: become an output (llm/verify.onnx)
    verifies: bool = False  # whether a hybrid's graph outputs `ChainValues`, to verify drafted chains
    only_chains: bool = False  # without the mask of a graph for CUDA with `fusion`
    kv_cache: str | None = None  # "fp8": the type of the KV cache
    cpu: bool = False  # whether a graph for ONNX Runtime alone is for a CPU
