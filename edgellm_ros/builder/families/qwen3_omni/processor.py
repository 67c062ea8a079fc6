# SPDX-License-Identifier: Apache-2.0
"""Reads the configuration of a Qwen3-Omni checkpoint's feature extractor.

Source: transformers, WhisperFeatureExtractor.
"""

from __future__ import annotations

from typing import Any

from edgellm_ros.builder.checkpoint_config import ConfigSection


def sound_processing(processor: ConfigSection, bins: int) -> dict[str, Any]:
    """Read the fields of `AudioConfig` that belong to the feature extractor.

    bins: mel bins of the audio encoder. ValueError if the extractor's differ.
    """
    processor.one_of("feature_extractor_type", ["WhisperFeatureExtractor"])
    processor.one_of("feature_size", [bins])
    processor.one_of("dither", [0], default=0)
    return {
        "sampling_rate": processor.one_of("sampling_rate", [16000], default=16000),
        "n_fft": processor.size("n_fft", 400),
        "hop_length": processor.size("hop_length", 160),
    }
