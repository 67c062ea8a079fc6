# SPDX-License-Identifier: Apache-2.0
"""Configuration of a video processor, and of how prompts tell the times of frames."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Video processors of transformers: the limits of an area are those of one frame, or of all frames together.
LIMITS_OF_A_FRAME, LIMITS_OF_ALL_FRAMES = "qwen2_vl", "qwen3_vl"
PROCESSORS = (LIMITS_OF_A_FRAME, LIMITS_OF_ALL_FRAMES)
# How a prompt tells times: as words before each group of frames, or as positions on the time axis of mRoPE.
# Positions are rounded down to whole ones, and the text continues after the video's rows and columns; or they
# are exact or whole, and the text continues after the last of them too.
AS_TEXT, AS_POSITIONS, AS_EXACT_POSITIONS = "text", "positions", "exact_positions"
AS_WHOLE_POSITIONS = "whole_positions"
OMNI_POSITIONS = (AS_EXACT_POSITIONS, AS_WHOLE_POSITIONS)  # of the Omni models, after which text continues
TIMESTAMPS = (AS_TEXT, AS_POSITIONS, *OMNI_POSITIONS)


BICUBIC = 3  # PIL's code of the filter that images are resized with


def check_bicubic(resample: int) -> None:
    """Check a processor's filter. ValueError for another one."""
    if resample != BICUBIC:
        raise ValueError(f"resample must be {BICUBIC} (bicubic), got {resample}")


@dataclass(frozen=True)
class VideoConfig:
    """Videos of a vision tower that takes pairs of frames, or larger groups."""

    token_id: int  # the chat template's placeholder of a video
    processor: str  # one of PROCESSORS
    timestamps: str  # one of TIMESTAMPS
    tokens_per_second: float  # positions per second; 0 with AS_TEXT
    min_pixels: int  # smallest area after resizing; the processor's `shortest_edge`
    max_pixels: int  # largest area after resizing; the processor's `longest_edge`
    max_video_tokens: int  # the processor's further limit with `cap_pixels_per_frame`; 0 = off
    min_frames: int  # frames that are sampled from a video file
    max_frames: int
    resample: int  # PIL's code of the filter: 3, bicubic
    rescale_factor: float
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]
    # Positions of a chunk of a video with sound, in which the rows of its frames are followed by those of its
    # sound; 0 = the engine takes no sound of a video.
    sound_chunk: int = 0

    def __post_init__(self) -> None:
        check_bicubic(self.resample)
        for name, choices in (("processor", PROCESSORS), ("timestamps", TIMESTAMPS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        for name in ("min_pixels", "min_frames"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for low, high in (("min_pixels", "max_pixels"), ("min_frames", "max_frames")):
            if getattr(self, high) < getattr(self, low):
                raise ValueError(f"{high} {getattr(self, high)} is less than {low} {getattr(self, low)}")
        for name in ("max_video_tokens", "sound_chunk"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        positions = self.timestamps != AS_TEXT
        if not 0 <= self.tokens_per_second < math.inf or (self.tokens_per_second > 0) != positions:
            expected = "positive" if positions else "0"
            raise ValueError(
                f"tokens_per_second must be {expected} with timestamps as {self.timestamps}, "
                f"got {self.tokens_per_second}"
            )
        if not 0 < self.rescale_factor < math.inf:
            raise ValueError(f"rescale_factor must be positive, got {self.rescale_factor}")
        for name in ("image_mean", "image_std"):
            if len(getattr(self, name)) != 3:
                raise ValueError(f"{name} must have 3 values, got {getattr(self, name)}")
        if min(self.image_std) <= 0:
            raise ValueError(f"image_std must be positive, got {self.image_std}")
