# SPDX-License-Identifier: Apache-2.0
"""Reads `preprocessor_config.json` of a Qwen3-Omni checkpoint.

The file configures image processor and feature extractor. Source: transformers, Qwen2VLImageProcessor and
WhisperFeatureExtractor.
"""

from __future__ import annotations

from typing import Any

from edgellm_ros.builder.checkpoint_config import ConfigSection

BICUBIC = 3  # PIL's code
SIZE = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}  # the image processor's default


def image_processing(processor: ConfigSection, patch: int, frames: int, merge: int) -> dict[str, Any]:
    """Read the fields of `VisionConfig` that belong to the image processor.

    patch, frames, merge: patch, temporal patch and merge size of the vision tower's config. ValueError if the
    image processor has other sizes, or a setting that is not supported.
    """
    processor.one_of("image_processor_type", ["Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast"])
    for step in ("do_resize", "do_rescale", "do_normalize"):
        processor.one_of(step, [True], default=True)
    for key, needed in (("patch_size", patch), ("temporal_patch_size", frames), ("merge_size", merge)):
        processor.one_of(key, [needed])
    low, high = _pixel_limits(processor)
    return {
        "min_pixels": low,
        "max_pixels": high,
        "resample": processor.one_of("resample", [BICUBIC], default=BICUBIC),
        "rescale_factor": processor.number("rescale_factor", 1 / 255),
        "image_mean": processor.numbers("image_mean"),
        "image_std": processor.numbers("image_std"),
    }


def _pixel_limits(processor: ConfigSection) -> tuple[int, int]:
    """Read the smallest and largest area of a resized image in pixels.

    `min_pixels` and `max_pixels`, each on its own, take precedence over `size`.
    """
    size = processor.section("size") if processor.has("size") else ConfigSection(SIZE, processor.where)
    low, high = (
        processor.size(key) if processor.has(key) else size.size(edge)
        for key, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
    )
    return low, high


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
