# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as the exporter sees it: runtime configurations and graph builders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from edgellm_ros.builder.draft.fusion import Fusion
from edgellm_ros.builder.graph import GraphBuilder
from edgellm_ros.builder.layers import ModelBuilder
from edgellm_ros.builder.lm_head import LMHead
from edgellm_ros.engine_directory.config import LanguageModelConfig, SpecialTokens
from edgellm_ros.engine_directory.fused_model import FusedModel
from edgellm_ros.multimodal.audio_config import AudioConfig
from edgellm_ros.multimodal.vision_config import VisionConfig


@dataclass(frozen=True)
class LLMOptions:
    """Options of a language model's graph."""

    precision: str  # type of weights, activations and, unless `kv_cache` says otherwise, KV cache
    capacity: int  # rows of the KV cache per sequence
    head: LMHead
    lora: bool = False  # with LoRA inputs
    hidden_state_layers: tuple[int, ...] = ()  # layers (from 1) whose hidden states become outputs
    fusion: Fusion | None = None  # of a draft head, whose result becomes an output (llm/verify.onnx)
    verifies: bool = False  # whether a hybrid's graph outputs what chains of tokens change states by
    only_chains: bool = False  # without the mask of a graph for CUDA with `fusion`
    kv_cache: str | None = None  # "fp8": the type of the KV cache


StoredGraph = tuple[GraphBuilder, str]  # and the name of its file


@dataclass(frozen=True)
class Model:
    """One checkpoint, read by its family."""

    llm: LanguageModelConfig
    embedding: str  # tensor of the embedding table [V,H]
    lm_head: str  # tensor of the LM head [V,H]; may be the embedding table
    special_tokens: SpecialTokens
    stop_token_ids: tuple[int, ...]
    build_llm: Callable[[LLMOptions], ModelBuilder]  # llm/model.onnx
    build_cuda_llm: Callable[[LLMOptions], ModelBuilder] | None = None  # llm/model.cuda.onnx
    describe_llm: Callable[[LLMOptions, StoredGraph, StoredGraph], FusedModel] | None = None
    # ^ llm/fused.json: function of options and of the graphs of `build_llm` and `build_cuda_llm`; None for
    #   layers that the fused kernels lack
    verifies_drafts: bool = False  # whether `build_llm` and `build_cuda_llm` take the option `fusion`
    norm_shift: float = 0.0  # the norms of the layers multiply by norm_shift + weight
    position_limit: str = "max_position_embeddings"  # what limits llm.max_position_embeddings, for errors
    vision: VisionConfig | None = None
    audio: AudioConfig | None = None
    encoders: Mapping[str, Callable[[str], ModelBuilder]] = field(default_factory=dict)
    # ^ folder in the engine directory ("visual", "audio") -> function of the precision that builds the graph
    cuda_encoders: Mapping[str, Callable[[str], ModelBuilder]] = field(default_factory=dict)
    # ^ the same for graphs for CUDA (model.cuda.onnx), of encoders that have one
