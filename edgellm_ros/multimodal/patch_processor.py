# SPDX-License-Identifier: Apache-2.0
"""Processes images for towers that take any size of whole merge blocks.

References: transformers, Qwen2VLImageProcessorPil; NVIDIA Isaac-GR00T, Eagle3_VLProcessor.
"""

from __future__ import annotations

import math

import numpy as np

from edgellm_ros.multimodal.image_pixels import ResizedImage, image_levels, whole_image
from edgellm_ros.multimodal.vision_config import AnySizeTower, Siglip2VisionConfig
from edgellm_ros.multimodal.vision_positions import PositionedTower, vision_positions

MAX_ASPECT_RATIO = 200
EAGLE_LONGEST_SIDE = 7000  # pixels


class PatchProcessor:
    """An `ImageProcessor` that keeps an image's aspect ratio as closely as it can."""

    def __init__(self, config: PositionedTower) -> None:
        self.config = config
        self.levels = image_levels(config)

    def token_grid(self, height: int, width: int) -> tuple[int, int]:
        """Compute rows and columns of tokens. ValueError for a side ratio above 200."""
        resized_height, resized_width = smart_resize(height, width, self.config)
        factor = self.config.size_factor
        return resized_height // factor, resized_width // factor

    def resized(self, height: int, width: int) -> list[ResizedImage]:
        """Return the size that `smart_resize` computes."""
        return [whole_image(self.config, *smart_resize(height, width, self.config))]

    def grid_inputs(self, token_grid: tuple[int, int]) -> dict[str, np.ndarray]:
        """Compute the positions of the patches, see `vision_positions`."""
        merge = self.config.spatial_merge_size
        return vision_positions(token_grid[0] * merge, token_grid[1] * merge, self.config)


def smart_resize(height: int, width: int, config: AnySizeTower) -> tuple[int, int]:
    """Compute height and width in pixels after resizing.

    Both are multiples of patch size times merge size, their product is within the processor's limits, and the
    aspect ratio is kept as closely as that allows. ValueError for a side ratio above 200.
    """
    check_aspect_ratio(height, width)
    fit = _fit_eagle if isinstance(config, Siglip2VisionConfig) else fit_area
    return fit(height, width, config.size_factor, config.min_pixels, config.max_pixels)


def _fit_eagle(height: int, width: int, factor: int, low: int, high: int) -> tuple[int, int]:
    """Compute a size as `fit_area`, whose sides have limits too.

    A larger area is that of the rounded sides, and not of the image.
    """
    sides = [min(max(factor, round(side / factor) * factor), EAGLE_LONGEST_SIDE) for side in (height, width)]
    area = sides[0] * sides[1]
    if area > high:
        shrink = math.sqrt(area / high)
        sides = [math.floor(side / shrink / factor) * factor for side in sides]
    elif area < low:
        grow = math.sqrt(low / (height * width))
        sides = [math.ceil(side * grow / factor) * factor for side in (height, width)]
    return sides[0], sides[1]


def check_aspect_ratio(height: int, width: int) -> None:
    """Check that the sides of an image differ by a factor of at most 200.

    ValueError otherwise.
    """
    if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
        raise ValueError(
            f"an image's sides may differ by a factor of at most {MAX_ASPECT_RATIO}, got {width}x{height}"
        )


def fit_area(
    height: int, width: int, factor: int, low: int, high: int, *, frames: int = 1, counted_frames: int = 1
) -> tuple[int, int]:
    """Compute a size in multiples of `factor` pixels, with an area within limits.

    The area, over all frames, is from `low` to `high`.

    counted_frames: what the multiples are compared with the limits for; `frames` rounded, in the reference.
    """
    resized_height, resized_width = round(height / factor) * factor, round(width / factor) * factor
    if counted_frames * resized_height * resized_width > high:
        shrink = math.sqrt(frames * height * width / high)
        resized_height = max(factor, math.floor(height / shrink / factor) * factor)
        resized_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif counted_frames * resized_height * resized_width < low:
        grow = math.sqrt(low / (frames * height * width))
        resized_height = math.ceil(height * grow / factor) * factor
        resized_width = math.ceil(width * grow / factor) * factor
    return resized_height, resized_width
