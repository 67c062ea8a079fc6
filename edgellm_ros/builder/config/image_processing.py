# SPDX-License-Identifier: Apache-2.0
"""Reads the configuration of a checkpoint's image processor.

Source: transformers, Qwen2VLImageProcessor and GotOcr2ImageProcessor, whose variants with the names Fast and
Pil have the same keys.
"""

from __future__ import annotations

from typing import Any

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.multimodal.video_config import BICUBIC

IMAGE_PROCESSOR = "image_processor"  # its key in processor_config.json
QWEN2_VL = ["Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil"]
GOT_OCR2 = ["GotOcr2ImageProcessor", "GotOcr2ImageProcessorFast", "GotOcr2ImageProcessorPil"]
SIZE = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}  # the default of Qwen2VLImageProcessor


def resized_images(processor: ConfigSection, patch: int, frames: int, merge: int) -> dict[str, Any]:
    """Read the fields of `QwenVisionTower` that belong to the image processor.

    patch, frames, merge: patch, temporal patch and merge size of the vision tower's config. ValueError if the
    image processor has other sizes, or a setting that is not supported.
    """
    processor.one_of("image_processor_type", QWEN2_VL)
    for key, needed in (("patch_size", patch), ("temporal_patch_size", frames), ("merge_size", merge)):
        processor.one_of(key, [needed])
    low, high = _pixel_limits(processor)
    return {"min_pixels": low, "max_pixels": high, **_normalisation(processor)}


def tiled_images(processor: ConfigSection, tile: int) -> dict[str, Any]:
    """Read the fields of `InternVLVisionConfig` that belong to the image processor.

    tile: side of a tile by the vision tower's config, in pixels. ValueError if the image processor has other
    tiles, or a setting that is not supported. `crop_to_patches` is not read: InternVL's processor sets it.
    """
    processor.one_of("image_processor_type", GOT_OCR2)
    size = processor.section("size")
    for side in ("height", "width"):
        size.one_of(side, [tile])
    return {
        "min_tiles": processor.size("min_patches", 1),
        "max_tiles": processor.size("max_patches", 12),
        **_normalisation(processor),
    }


def _normalisation(processor: ConfigSection) -> dict[str, Any]:
    """Read the fields that all image processors have."""
    for step in ("do_resize", "do_rescale", "do_normalize"):
        processor.one_of(step, [True], default=True)
    return {
        "resample": processor.one_of("resample", [BICUBIC], default=BICUBIC),
        "rescale_factor": processor.number("rescale_factor", 1 / 255),
        "image_mean": colours(processor, "image_mean"),
        "image_std": colours(processor, "image_std"),
    }


def colours(processor: ConfigSection, key: str) -> tuple[float, ...]:
    """Read a value for each colour channel (RGB)."""
    values = processor.numbers(key)
    if len(values) != 3:
        raise processor.fail(key, "expected 3 values (RGB)")
    return values


def _pixel_limits(processor: ConfigSection) -> tuple[int, int]:
    """Read the smallest and largest area of a resized image in pixels.

    `min_pixels` and `max_pixels`, each on its own, take precedence over `size`.
    """
    size = processor.section("size") if processor.has("size") else ConfigSection(SIZE, processor.where)
    low, high = (
        processor.size(key) if processor.has(key) else size.size(edge)
        for key, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
    )
    return area_limits(processor, low, high)


def area_limits(processor: ConfigSection, low: int, high: int) -> tuple[int, int]:
    """Check the smallest and largest area of a processor in pixels, and return both."""
    if high < low:
        raise ValueError(f"{processor.where}: largest area {high} is less than the smallest, {low} pixels")
    return low, high
