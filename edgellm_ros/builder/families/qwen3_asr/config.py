# SPDX-License-Identifier: Apache-2.0
"""Reads and checks Qwen3-ASR's configurations, in both published layouts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection, MixtureOfExpertsError
from edgellm_ros.builder.config.rope import require_theta
from edgellm_ros.builder.families.qwen3_omni.config import AudioArchitecture, audio_architecture
from edgellm_ros.builder.families.qwen3_omni.processor import WHISPER
from edgellm_ros.builder.weights.weights import Weights

MIN_SAMPLES = 8000  # a constant in the original's code, and a key of the feature extractor of transformers
# Names of the encoder's sizes, and those that a checkpoint in the layout of transformers may have instead.
ALIASES = {
    "d_model": "hidden_size",
    "encoder_layers": "num_hidden_layers",
    "encoder_attention_heads": "num_attention_heads",
    "encoder_ffn_dim": "intermediate_size",
}
# Keys without a default: the model code's defaults are sizes of other models.
ENCODER_SIZES = (
    "n_window",
    "n_window_infer",
    "num_mel_bins",
    "output_dim",
    "downsample_hidden_size",
    *ALIASES,
)
TEXT_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)


@dataclass(frozen=True)
class Layout:
    """Names of a published layout."""

    text: str  # module of the language model's tensors
    lm_head: str  # tensor
    tower: str  # module of the audio encoder's tensors
    projector: tuple[str, str, str]  # its module, and its two layers
    extractor: str  # type of the feature extractor


ORIGINAL = Layout(
    "thinker.model",
    "thinker.lm_head.weight",
    "thinker.audio_tower",
    ("thinker.audio_tower", "proj1", "proj2"),
    WHISPER,
)
TRANSFORMERS = Layout(
    "model.language_model",
    "lm_head.weight",
    "model.audio_tower",
    ("model.multi_modal_projector", "linear_1", "linear_2"),
    "Qwen3ASRFeatureExtractor",
)


def find_layout(config: ConfigSection) -> tuple[Layout, ConfigSection]:
    """Return the layout of a checkpoint, and the section with encoder and text."""
    if config.has("thinker_config"):
        return ORIGINAL, config.section("thinker_config")
    if config.has("audio_config"):
        return TRANSFORMERS, config
    raise ValueError(
        f"{config.where}: expected thinker_config (the original layout) or audio_config (the layout of "
        "transformers), found neither"
    )


def refuse_aligner(section: ConfigSection, weights: Weights) -> None:
    """Raise ValueError for the forced aligner, whose head classifies times."""
    reason = "a forced aligner, which finds the times of given words; supported: speech to text"
    if section.has("classify_num"):
        raise section.fail("classify_num", reason)
    if "score.weight" in weights:
        raise ValueError(f"{weights.where}: tensor 'score.weight': {reason}")


def check_text(text: ConfigSection, weights: Weights, prefix: str) -> None:
    """Raise ValueError for a missing key, and MixtureOfExpertsError for experts.

    prefix: module of the language model's tensors, which tell whether it has experts: published
    configurations keep keys of a mixture of experts for a dense model.
    """
    text.require(TEXT_SIZES)
    text.number("rms_norm_eps")
    require_theta(text)
    for layer in range(text.size("num_hidden_layers")):
        module = f"{prefix}.layers.{layer}.mlp.experts"
        if weights.has_module(module):
            raise MixtureOfExpertsError(
                f"{weights.where}: tensors of '{module}': a mixture of experts; supported: dense layers"
            )


def encoder_architecture(audio: ConfigSection, processor: ConfigSection, layout: Layout) -> AudioArchitecture:
    """Read the encoder's section, with the usual names, and the feature extractor.

    Each sound is extended to MIN_SAMPLES, and its last chunk is padded also if it is the only one.
    """
    audio.require(ENCODER_SIZES)
    audio.text("activation_function")
    built = audio_architecture(audio, processor, layout.tower, layout.projector, layout.extractor)
    window = built.config.n_window
    processor.one_of("n_window", [window], default=window)
    config = processor.make(
        partial(dataclasses.replace, built.config),
        min_samples=processor.integer("min_length", MIN_SAMPLES),
        whole_chunks=True,
    )
    return dataclasses.replace(built, config=config)
