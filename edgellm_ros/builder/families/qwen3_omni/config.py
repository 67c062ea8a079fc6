# SPDX-License-Identifier: Apache-2.0
"""Reads and checks Qwen3-Omni's experts and audio encoder.

The thinker has them beside what Qwen3-VL has. The checks cover everything that the graphs rely on.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.families.qwen3_omni.processor import WHISPER, sound_processing
from edgellm_ros.multimodal.audio.config import Qwen3AudioConfig


@dataclass(frozen=True)
class AudioArchitecture:
    """Audio encoder."""

    config: Qwen3AudioConfig  # for the runtime; the graph uses all fields
    downsample_hidden_size: int
    encoder_ffn_dim: int
    tower: str  # module of the encoder's tensors
    projector: tuple[
        str, str, str
    ]  # module of the layers from the encoder to the embeddings, and their names


def check_dense(text: ConfigSection) -> None:
    """Raise MixtureOfExpertsError if a layer is a mixture of experts.

    Rule and defaults are those of the model code.
    """
    if not text.integer("num_experts", 128):
        return
    dense = text.integers("mlp_only_layers") if text.has("mlp_only_layers") else ()
    step = text.size("decoder_sparse_step", 1)
    layers = range(text.size("num_hidden_layers"))
    sparse = [layer for layer in layers if layer not in dense and (layer + 1) % step == 0]
    if sparse:
        raise text.mixture_of_experts("num_experts", f"layers are supported; layer {sparse[0]} has experts")


def audio_architecture(
    audio: ConfigSection,
    processor: ConfigSection,
    tower: str,
    projector: tuple[str, str, str],
    extractor: str = WHISPER,
) -> AudioArchitecture:
    """Read the section of the audio encoder, and its feature extractor.

    tower, projector: see `AudioArchitecture`. extractor: type of the feature extractor.
    """
    audio.one_of("activation_function", ["gelu"], default="gelu")
    bins = audio.size("num_mel_bins")
    # The model code counts 13 tokens per chunk whatever n_window is, which is right for 50 only.
    window = audio.one_of("n_window", [50], default=50)
    built = audio.make(
        Qwen3AudioConfig,
        d_model=audio.size("d_model"),
        encoder_layers=audio.size("encoder_layers"),
        encoder_attention_heads=audio.size("encoder_attention_heads"),
        output_dim=audio.size("output_dim"),
        n_window=window,
        n_window_infer=audio.size("n_window_infer", 800),
        num_mel_bins=bins,
        **sound_processing(processor, bins, extractor),
    )
    sizes = audio.size("downsample_hidden_size"), audio.size("encoder_ffn_dim")
    return AudioArchitecture(built, *sizes, tower, projector)
