# SPDX-License-Identifier: Apache-2.0
"""Processes images for Qwen's vision towers: any size, in multiples of a merge block.

Reference: transformers, Qwen2VLImageProcessorPil.
"""

from __future__ import annotations

import math

import numpy as np

from edgellm_ros.multimodal.image_pixels import PatchCutter, check_image
from edgellm_ros.multimodal.vision_config import Qwen2_5VisionConfig, Qwen3VisionConfig, QwenVisionTower
from edgellm_ros.multimodal.vision_positions import vision_positions

MAX_ASPECT_RATIO = 200


class PatchProcessor:
    """An `ImageProcessor` that keeps an image's aspect ratio as closely as it can."""

    def __init__(self, config: Qwen3VisionConfig | Qwen2_5VisionConfig) -> None:
        self._config = config
        self._cutter = PatchCutter(config)

    def token_grid(self, height: int, width: int) -> tuple[int, int]:
        """Compute rows and columns of tokens. ValueError for a side ratio above 200."""
        resized_height, resized_width = smart_resize(height, width, self._config)
        factor = self._config.size_factor
        return resized_height // factor, resized_width // factor

    def pixel_values(self, image: np.ndarray) -> np.ndarray:
        """Compute normalised patches [P, C*p*p], merge block by merge block.

        The reference repeats a still image for T frames; these are the patches of one frame.
        """
        check_image(image)
        height, width = smart_resize(image.shape[0], image.shape[1], self._config)
        return self._cutter.cut(self._cutter.resize(image, height, width))

    def grid_inputs(self, token_grid: tuple[int, int]) -> dict[str, np.ndarray]:
        """Compute the positions of the patches, see `vision_positions`."""
        merge = self._config.spatial_merge_size
        return vision_positions(token_grid[0] * merge, token_grid[1] * merge, self._config)


def smart_resize(height: int, width: int, config: QwenVisionTower) -> tuple[int, int]:
    """Compute height and width in pixels after resizing.

    Both are multiples of patch size times merge size, their product is within the processor's limits, and the
    aspect ratio is kept as closely as that allows. ValueError for a side ratio above 200.
    """
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_ASPECT_RATIO:
        raise ValueError(
            f"an image's sides may differ by a factor of at most {MAX_ASPECT_RATIO}, got {width}x{height}"
        )
    factor = config.size_factor
    resized_height, resized_width = round(height / factor) * factor, round(width / factor) * factor
    if resized_height * resized_width > config.max_pixels:
        shrink = math.sqrt(height * width / config.max_pixels)
        resized_height = max(factor, math.floor(height / shrink / factor) * factor)
        resized_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif resized_height * resized_width < config.min_pixels:
        grow = math.sqrt(config.min_pixels / (height * width))
        resized_height = math.ceil(height * grow / factor) * factor
        resized_width = math.ceil(width * grow / factor) * factor
    return resized_height, resized_width
