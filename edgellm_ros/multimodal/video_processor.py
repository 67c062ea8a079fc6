# SPDX-License-Identifier: Apache-2.0
"""Processes videos for Qwen's vision towers: groups of frames become patches.

A group has temporal_patch_size frames, 2 in all published models. Every patch spans the frames of its group,
and patches attend to their own group only.

Reference: transformers, Qwen2VLVideoProcessor, Qwen3VLVideoProcessor, Qwen3VLProcessor,
Qwen2_5OmniProcessor and Qwen3OmniMoeProcessor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from edgellm_ros.multimodal.image_pixels import ResizedImage, whole_image
from edgellm_ros.multimodal.patch_processor import check_aspect_ratio, fit_area
from edgellm_ros.multimodal.video import Video
from edgellm_ros.multimodal.video_config import (
    AS_EXACT_POSITIONS,
    LIMITS_OF_A_FRAME,
    OMNI_POSITIONS,
    VideoConfig,
)
from edgellm_ros.multimodal.vision_config import QwenVisionTower


@dataclass(frozen=True)
class VideoGrid:
    """Tokens of a video."""

    groups: int  # of frames
    rows: int  # of tokens of a group
    columns: int

    @property
    def group_tokens(self) -> int:
        return self.rows * self.columns

    @property
    def tokens(self) -> int:
        return self.groups * self.group_tokens


class VideoProcessor:
    """Says how videos become inputs of the vision tower, one group of frames per run."""

    def __init__(self, tower: QwenVisionTower, config: VideoConfig) -> None:
        self.tower, self._config = tower, config
        # In the reference's order of roundings, which is not that of its image processor.
        mean, std = (
            np.array(values, np.float32) * np.float32(1.0 / config.rescale_factor)
            for values in (config.image_mean, config.image_std)
        )
        # the normalised value of each of a channel's 256 values, [C, 256]
        self.levels = (np.arange(256, dtype=np.float32)[None, :] - mean[:, None]) / std[:, None]

    def grid(self, frames: int, height: int, width: int) -> VideoGrid:
        """Compute the tokens of a video. ValueError for a side ratio above 200."""
        size, factor = self._resized(frames, height, width), self.tower.size_factor
        groups = -(-frames // self.tower.temporal_patch_size)
        return VideoGrid(groups, size[0] // factor, size[1] // factor)

    def group(self, video: Video, index: int) -> tuple[np.ndarray, ...]:
        """Return the frames of a group; the last one is repeated where the video ends."""
        length = self.tower.temporal_patch_size
        frames = tuple(video.frames[index * length : (index + 1) * length])
        return frames + frames[-1:] * (length - len(frames))

    def resized(self, video: Video) -> list[ResizedImage]:
        """Return the size to which every frame is resized."""
        return [whole_image(self.tower, *self._resized(len(video.frames), *video.size))]

    def group_times(self, video: Video) -> list[float]:
        """Compute each group's time in seconds: the mean of its first and last frame's."""
        length, times = self.tower.temporal_patch_size, list(video.timestamps or ())
        times += times[-1:] * (-len(times) % length)
        return [(times[i] + times[i + length - 1]) / 2 for i in range(0, len(times), length)]

    def group_positions(self, video: Video) -> tuple[float, ...]:
        """Compute the time of each group on mRoPE's time axis.

        Time is counted from the first group's; 0 if times are words. All products are rounded to float32, in
        the order of the reference.
        """
        length, per_second = self.tower.temporal_patch_size, np.float32(self._config.tokens_per_second)
        groups = np.arange(-(-len(video.frames) // length), dtype=np.float32)
        seconds = np.float32(length / video.sampled_fps)
        if self._config.timestamps in OMNI_POSITIONS:
            times = groups * seconds * per_second
        else:
            times = groups * (per_second * seconds)
        exact = self._config.timestamps == AS_EXACT_POSITIONS
        return tuple((times if exact else np.floor(times)).tolist())

    def sample(self, total: int, file_fps: float, fps: float) -> list[int]:
        """Choose frames of a video file with `total` frames, about `fps` per second.

        ValueError for a file with fewer frames than a group.
        """
        length, config = self.tower.temporal_patch_size, self._config
        wanted = total / file_fps * fps
        if config.processor == LIMITS_OF_A_FRAME:
            most = min(config.max_frames, total) // length * length
            count = math.floor(min(max(wanted, config.min_frames), most, total) / length) * length
            if not count:
                raise ValueError(f"the file has {total} frames, expected at least {length}")
            step = total / count  # torch.arange(0, total, step): multiples in float64, rounded to float32
            places = np.arange(math.ceil(total / step), dtype=np.float64) * step
            return places.astype(np.float32).astype(int).tolist()
        count = min(max(int(wanted), config.min_frames), config.max_frames, total)
        return np.linspace(0, total - 1, count).round().astype(int).tolist()

    def _resized(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """Compute height and width in pixels after resizing.

        Both are multiples of patch size times merge size.
        """
        config, factor, length = self._config, self.tower.size_factor, self.tower.temporal_patch_size
        low, high, cap = config.min_pixels, config.max_pixels, config.max_video_tokens
        if config.processor == LIMITS_OF_A_FRAME:
            if cap:
                share = int(cap * factor * factor * 0.9) * length // frames
                high = max(min(high, share), int(low * 1.05))
            check_aspect_ratio(height, width)
            return fit_area(height, width, factor, low, high)
        frames = max(frames, length)  # the reference refuses a shorter video; here it is repeated
        if cap:
            high = max(min(cap * factor * factor, high // frames), int(low * 1.05)) * frames
        if min(height, width) < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        check_aspect_ratio(height, width)
        return fit_area(
            height, width, factor, low, high, frames=frames, counted_frames=round(frames / length) * length
        )
