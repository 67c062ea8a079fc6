# SPDX-License-Identifier: Apache-2.0
"""Reads the configuration of a checkpoint's video processor.

Source: transformers, Qwen2VLVideoProcessor, Qwen3VLVideoProcessor, AutoVideoProcessor,
Qwen2_5OmniProcessor and Qwen3OmniMoeProcessor.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection, read_section
from edgellm_ros.builder.config.image_processing import area_limits, colours
from edgellm_ros.multimodal.video_config import (
    AS_POSITIONS,
    AS_TEXT,
    BICUBIC,
    LIMITS_OF_A_FRAME,
    LIMITS_OF_ALL_FRAMES,
    VideoConfig,
)

FILES = ("video_preprocessor_config.json", "preprocessor_config.json")
QWEN2_VL, QWEN3_VL = "Qwen2VLVideoProcessor", "Qwen3VLVideoProcessor"


@dataclass(frozen=True)
class Defaults:
    """The defaults of a video processor's class."""

    processor: str
    patch_size: int
    shortest_edge: int
    longest_edge: int
    max_video_tokens: int  # with cap_pixels_per_frame
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
CLASSES = {
    QWEN2_VL: Defaults(
        LIMITS_OF_A_FRAME,
        patch_size=14,
        shortest_edge=128 * 28 * 28,
        longest_edge=28 * 28 * 768,
        max_video_tokens=128000,
        mean=CLIP_MEAN,
        std=CLIP_STD,
    ),
    QWEN3_VL: Defaults(
        LIMITS_OF_ALL_FRAMES,
        patch_size=16,
        shortest_edge=128 * 32 * 32,
        longest_edge=32 * 32 * 768,
        max_video_tokens=768,
        mean=HALF,
        std=HALF,
    ),
}


def read_video(
    checkpoint: Path,
    config: ConfigSection,
    tower: ConfigSection,
    default_class: str,
    tokens_per_second: float | None = None,
    *,
    timestamps: str = AS_POSITIONS,
    limits: tuple[int, int] | None = None,
    sound_chunk: int = 0,
) -> VideoConfig | None:
    """Read a tower's video processor; None without one or without a token for videos.

    config: the section with `video_token_id`. tower: the section of the vision tower. default_class: for
    checkpoints that name neither a video nor an image processor's class. tokens_per_second: positions per
    second on mRoPE's time axis; None = times are words of the prompt. timestamps, sound_chunk: see
    `VideoConfig`. limits: smallest and largest area in pixels of a model whose processor has
    its own, whatever the checkpoint says. ValueError if the video processor has other sizes, or a setting
    that is not supported.
    """
    processor = _find_processor(checkpoint)
    if processor is None or not config.has("video_token_id"):
        return None
    name = _class_name(processor, default_class)
    defaults = CLASSES[name]
    sizes = {
        "patch_size": tower.size("patch_size", defaults.patch_size),
        "temporal_patch_size": tower.size("temporal_patch_size", 2),
        "merge_size": tower.size("spatial_merge_size", 2),
    }
    for key, needed in sizes.items():
        processor.one_of(key, [needed], default=defaults.patch_size if key == "patch_size" else 2)
    for step in ("do_resize", "do_rescale", "do_normalize"):
        processor.one_of(step, [True], default=True)
    capped = processor.flag("cap_pixels_per_frame", False)
    low, high = limits or _pixel_limits(processor, defaults, name)
    return processor.make(
        VideoConfig,
        token_id=config.integer("video_token_id"),
        processor=defaults.processor,
        timestamps=AS_TEXT if tokens_per_second is None else timestamps,
        tokens_per_second=tokens_per_second or 0.0,
        min_pixels=low,
        max_pixels=high,
        max_video_tokens=processor.size("max_video_tokens", defaults.max_video_tokens) if capped else 0,
        min_frames=processor.size("min_frames", 4),
        max_frames=processor.size("max_frames", 768),
        resample=processor.one_of("resample", [BICUBIC], default=BICUBIC),
        rescale_factor=processor.number("rescale_factor", 1 / 255),
        image_mean=_values(processor, "image_mean", defaults.mean),
        image_std=_values(processor, "image_std", defaults.std),
        sound_chunk=sound_chunk,
    )


def _find_processor(checkpoint: Path) -> ConfigSection | None:
    """Find the section in the order of transformers."""
    whole = checkpoint / "processor_config.json"
    if whole.is_file():
        section = read_section(whole)
        if section.has("video_processor"):
            return section.section("video_processor")
    found = [checkpoint / name for name in FILES if (checkpoint / name).is_file()]
    return read_section(found[0]) if found else None


def _class_name(processor: ConfigSection, default: str) -> str:
    """Return the named class, that of the image processor's name, or the default."""
    if processor.has("video_processor_type"):
        return processor.one_of("video_processor_type", list(CLASSES))
    name = str(processor.data.get("image_processor_type", "")).replace("ImageProcessor", "VideoProcessor")
    return name if name in CLASSES else default


def _pixel_limits(processor: ConfigSection, defaults: Defaults, name: str) -> tuple[int, int]:
    """Read the smallest and largest area.

    `min_pixels` and `max_pixels`, each on its own, take precedence over `size` in Qwen2VLVideoProcessor only.
    """
    standard = {"shortest_edge": defaults.shortest_edge, "longest_edge": defaults.longest_edge}
    size = processor.section("size") if processor.has("size") else ConfigSection(standard, processor.where)
    low, high = (
        processor.size(key) if name == QWEN2_VL and processor.has(key) else size.size(edge)
        for key, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
    )
    return area_limits(processor, low, high)


def _values(processor: ConfigSection, key: str, default: tuple[float, ...]) -> tuple[float, ...]:
    return colours(processor, key) if processor.has(key) else default
