# SPDX-License-Identifier: Apache-2.0
"""Reads and checks the configurations of Qwen2.5-Omni's thinker.

Keys have no defaults here: those of the model code are the sizes of one published model.
"""

from __future__ import annotations

from pathlib import Path

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.config.prompt_files import template_has_token
from edgellm_ros.builder.config.rope import require_theta, rope_section
from edgellm_ros.builder.config.video_processing import QWEN2_VL, read_video
from edgellm_ros.builder.families.qwen2_5_omni.audio import AudioArchitecture
from edgellm_ros.builder.families.qwen3_omni.processor import sound_processing
from edgellm_ros.multimodal.audio.config import Qwen2_5AudioConfig
from edgellm_ros.multimodal.video_config import AS_WHOLE_POSITIONS, VideoConfig

# Ids of placeholders -> their names in published configurations.
TOKENS = {f"{kind}_token_id": f"{kind}_token_index" for kind in ("image", "video", "audio")}
BOUNDARIES = tuple(f"{kind}_{side}_token_id" for kind in ("vision", "audio") for side in ("start", "end"))
TEXT_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
)
VISION_SIZES = (
    "depth",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "out_hidden_size",
    "patch_size",
    "spatial_merge_size",
    "temporal_patch_size",
    "window_size",
    "fullatt_block_indexes",
    "hidden_act",
)
AUDIO_SIZES = (
    "d_model",
    "encoder_layers",
    "encoder_attention_heads",
    "encoder_ffn_dim",
    "output_dim",
    "n_window",
    "num_mel_bins",
    "max_source_positions",
    "activation_function",
)
# Areas of a frame in pixels; the model's processor has them in place of those of the checkpoint's files.
FRAME_LIMITS = 128 * 28 * 28, 768 * 28 * 28


def check_text(text: ConfigSection) -> None:
    """Raise ValueError if the section of the language model lacks a key."""
    text.require(TEXT_SIZES)
    require_theta(text)
    rope_section(text).require(["mrope_section"])


def audio_architecture(audio: ConfigSection, processor: ConfigSection, tower: str) -> AudioArchitecture:
    """Read the section of the audio encoder, and its feature extractor.

    tower: module of the encoder's tensors.
    """
    audio.require(AUDIO_SIZES)
    audio.one_of("activation_function", ["gelu"])
    bins, window = audio.size("num_mel_bins"), audio.size("n_window")
    if window > audio.size("max_source_positions"):
        raise audio.fail("max_source_positions", f"expected at least n_window {window}, the rows of a chunk")
    built = audio.make(
        Qwen2_5AudioConfig,
        d_model=audio.size("d_model"),
        encoder_layers=audio.size("encoder_layers"),
        encoder_attention_heads=audio.size("encoder_attention_heads"),
        output_dim=audio.size("output_dim"),
        n_window=window,
        num_mel_bins=bins,
        **sound_processing(processor, bins),
    )
    return AudioArchitecture(built, audio.size("encoder_ffn_dim"), tower)


def thinker_video(checkpoint: Path, thinker: ConfigSection, tower: ConfigSection) -> VideoConfig | None:
    """Read the video processor; None if the chat template writes no videos.

    thinker, tower: the sections of the thinker and its vision tower.
    """
    key = "video_token_id"
    if not thinker.has(key) or not template_has_token(checkpoint, thinker.integer(key)):
        return None
    per_second = thinker.number("position_id_per_seconds")
    chunk = int(per_second * thinker.number("seconds_per_chunk"))
    if chunk < 1:
        raise thinker.fail("seconds_per_chunk", f"expected a whole position, of {per_second:g} per second")
    return read_video(
        checkpoint,
        thinker,
        tower,
        QWEN2_VL,
        per_second,
        timestamps=AS_WHOLE_POSITIONS,
        limits=FRAME_LIMITS,
        sound_chunk=chunk,
    )
