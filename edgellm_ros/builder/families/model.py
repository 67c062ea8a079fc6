# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as its family has read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from edgellm_ros.builder.action.expert_config import Expert
from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.config.rope import read_position_limit
from edgellm_ros.builder.config.vocabulary import read_generation_config, special_tokens, stop_token_ids
from edgellm_ros.builder.graph.graph import GraphBuilder
from edgellm_ros.builder.graph.layers import ModelBuilder
from edgellm_ros.builder.graph.lm_head import LM_HEAD_TENSOR, find_lm_head
from edgellm_ros.builder.model.decoder import Decoder, Layer
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine_directory.config import GenerationDefaults, SpecialTokens
from edgellm_ros.engine_directory.language_model_config import LanguageModelConfig
from edgellm_ros.fused.description.vision import FusedVisionModel
from edgellm_ros.multimodal.audio.config import AudioConfig
from edgellm_ros.multimodal.vision_config import VisionConfig

MTP = "mtp"  # module of the tensors of a draft head


@dataclass(frozen=True)
class MTPModule:
    """A module that predicts the token after the next one, as its family lays it out.

    The tensors of its layer have the names of the base's layers.
    """

    prefix: str  # of the names of its tensors, such as "mtp"
    layer: Layer
    layer_prefix: str  # of the names of the layer's tensors after `prefix`, such as "layers.0."
    embedding_norm: str  # names after `prefix`
    hidden_norm: str
    fc: str
    norm: str
    state_first: bool = False  # `fc` takes the state before the embedding
    count: int = 1  # of such modules that the checkpoint has, one for each token ahead


@dataclass(frozen=True, kw_only=True)
class Model:
    """One checkpoint, read by its family."""

    decoder: Decoder
    lm_head: str  # tensor of the LM head [V,H]; may be the embedding table
    special_tokens: SpecialTokens
    stop_token_ids: tuple[int, ...]
    position_limit: str = "max_position_embeddings"  # what limits llm.max_position_embeddings, for errors
    vision: VisionConfig | None = None
    audio: AudioConfig | None = None
    encoders: Mapping[str, Callable[[str], ModelBuilder]] = field(default_factory=dict)
    # ^ folder in the engine directory ("visual", "audio") -> function of the precision that builds the graph
    cuda_encoders: Mapping[str, Callable[[str], ModelBuilder]] = field(default_factory=dict)
    # ^ the same for graphs for CUDA (model.cuda.onnx), of encoders that have one
    mtp: MTPModule | None = None  # the draft head that the checkpoint has
    describe_vision: Callable[[GraphBuilder, str], FusedVisionModel | None] | None = None
    # ^ describes the vision tower's graph, saved under a name, for the fused kernels; None = not for them
    weights: Weights | None = None  # under the names of the graphs, without the expert's; None = as they are
    expert: Expert | None = None  # None = that of the folder action_expert, if there is one
    prompts: Mapping[str, bytes] | None = None  # file -> contents, as of `prompt_files`; None = by the folder
    generation: GenerationDefaults | None = None  # None = those of generation_config.json
    input_tokens: tuple[int, ...] = ()  # that prompts have and answers never do

    @property
    def llm(self) -> LanguageModelConfig:
        """Return the configuration of the language model."""
        return self.decoder.config

    @property
    def transcribes(self) -> bool:
        """Tell whether the model is for speech to text: prompts have no text of the user."""
        return self.special_tokens.transcript_token_id is not None

    @property
    def embedding(self) -> str:
        """Return the tensor of the embedding table [V,H]."""
        return self.decoder.embedding


def mtp_module(text: ConfigSection, weights: Weights, decoder: Decoder) -> MTPModule | None:
    """Return the draft head of a checkpoint that has one in Qwen3.5's layout.

    `training/mtp.py` writes it for other families. Its layer is one of the model with attention.
    """
    attention = decoder.layers[decoder.config.attention_layers[0]]
    if not weights.has_module(MTP) or len(attention) != 2:
        return None
    return MTPModule(
        MTP,
        attention,
        layer_prefix="layers.0.",
        embedding_norm="pre_fc_norm_embedding",
        hidden_norm="pre_fc_norm_hidden",
        fc="fc",
        norm="norm",
        count=text.integer("mtp_num_hidden_layers", 1),
    )


def make_model(
    checkpoint: Path,
    config: ConfigSection,
    weights: Weights,
    decoder: Decoder,
    text: ConfigSection | None = None,
    *,
    tied: bool | None = None,
    head: str = LM_HEAD_TENSOR,
    stops: tuple[int, ...] | None = None,
) -> Model:
    """Make the model of a checkpoint's decoder.

    text: the decoder's section, if that is not the whole config; tied: whether the embedding table may be the
    LM head, None = as `tie_word_embeddings` of the config says; head: name of the LM head's tensor; stops:
    the ids that end an answer, None = those of `stop_token_ids`.
    """
    generation, text = read_generation_config(checkpoint), text or config
    tied = config.flag("tie_word_embeddings", False) if tied is None else tied
    return Model(
        decoder=decoder,
        lm_head=find_lm_head(weights, decoder.embedding, tied, head),
        special_tokens=special_tokens(config, text, generation),
        stop_token_ids=stop_token_ids(text, generation) if stops is None else stops,
        position_limit=read_position_limit(text)[1],
        mtp=mtp_module(text, weights, decoder),
    )
