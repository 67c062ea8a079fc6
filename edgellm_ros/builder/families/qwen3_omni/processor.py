# SPDX-License-Identifier: Apache-2.0
"""Reads the configurations of Qwen3-Omni's audio and video processors.

The files are those of a checkpoint's feature extractor and video processor.

Source: transformers, WhisperFeatureExtractor and Qwen3OmniMoeProcessor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.config.prompt_files import template_has_token
from edgellm_ros.builder.config.video_processing import QWEN2_VL, read_video
from edgellm_ros.multimodal.video_config import AS_EXACT_POSITIONS, VideoConfig

# Areas of a frame in pixels; the model's processor has them in place of those of the checkpoint's files.
FRAME_LIMITS = 128 * 32 * 32, 768 * 32 * 32
WHISPER = "WhisperFeatureExtractor"
POSITIONS_PER_SECOND = 25  # of mRoPE's time axis, for checkpoints without the key


def thinker_video(checkpoint: Path, thinker: ConfigSection, tower: ConfigSection) -> VideoConfig | None:
    """Read the video processor; None if the chat template writes no videos.

    thinker, tower: the sections of the thinker and its vision tower.
    """
    key = "video_token_id"
    if not thinker.has(key) or not template_has_token(checkpoint, thinker.integer(key)):
        return None
    per_second = thinker.number("position_id_per_seconds", POSITIONS_PER_SECOND)
    return read_video(
        checkpoint,
        thinker,
        tower,
        QWEN2_VL,
        per_second,
        timestamps=AS_EXACT_POSITIONS,
        limits=FRAME_LIMITS,
    )


def sound_processing(processor: ConfigSection, bins: int, extractor: str = WHISPER) -> dict[str, Any]:
    """Read the fields of `AudioConfig` that belong to the feature extractor.

    bins: mel bins of the audio encoder. extractor: type of the extractor, which computes the features as
    Whisper's does. ValueError if the processor's differ.
    """
    processor.one_of("feature_extractor_type", [extractor])
    processor.one_of("feature_size", [bins])
    processor.one_of("dither", [0], default=0)
    return {
        "sampling_rate": processor.one_of("sampling_rate", [16000], default=16000),
        "n_fft": processor.size("n_fft", 400),
        "hop_length": processor.size("hop_length", 160),
    }
