# SPDX-License-Identifier: Apache-2.0
"""Converts images to normalised patches, bit-equal to the checkpoint's processor.

Reference: transformers, Qwen2VLImageProcessorPil (resize by Pillow, bicubic; then rescale, normalise, cut
into patches).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from PIL import Image

from edgellm_ros.multimodal.config import VisionConfig

MAX_ASPECT_RATIO = 200


@dataclass(frozen=True)
class ImagePatches:
    """Normalised patches of one image, merge block by merge block.

    The reference repeats a still image for T frames; these are the patches of one frame.
    """

    pixel_values: np.ndarray  # [grid_height * grid_width, C*p*p] float32
    grid_height: int  # in patches
    grid_width: int


class ImageProcessor:
    """Resizes and normalises images, and cuts them into patches."""

    def __init__(self, config: VisionConfig) -> None:
        self._config = config
        # A pixel has 256 values: rescaling and normalising are one look-up, in the reference's order of
        # roundings.
        levels = (np.arange(256, dtype=np.float64) * config.rescale_factor).astype(np.float32)
        mean, std = np.array(config.image_mean, np.float32), np.array(config.image_std, np.float32)
        self._normalised = (levels[None, :] - mean[:, None]) / std[:, None]  # [C, 256]

    def process(self, image: np.ndarray) -> ImagePatches:
        """Process an image [H, W, 3] uint8 RGB.

        ValueError for another shape or type, or a side ratio above 200.
        """
        check_image(image)
        height, width = smart_resize(image.shape[0], image.shape[1], self._config)
        if (height, width) != image.shape[:2]:
            image = np.asarray(
                Image.fromarray(image).resize((width, height), Image.Resampling(self._config.resample))
            )
        return self._patches(image)

    def _patches(self, image: np.ndarray) -> ImagePatches:
        patch, merge = self._config.patch_size, self._config.spatial_merge_size
        rows, columns = image.shape[0] // patch, image.shape[1] // patch
        blocks = image.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
        blocks = blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3, patch, patch)
        pixel_values = np.empty((rows * columns, 3, patch, patch), np.float32)
        for channel in range(3):
            pixel_values[:, channel] = self._normalised[channel][blocks[:, channel]]
        return ImagePatches(pixel_values.reshape(rows * columns, -1), rows, columns)


def check_image(image: np.ndarray) -> None:
    """Check that an image is [H, W, 3] uint8 with at least one pixel.

    ValueError otherwise.
    """
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        described = (
            f"{image.dtype} {list(image.shape)}" if isinstance(image, np.ndarray) else type(image).__name__
        )
        raise ValueError(f"an image must be a uint8 array [height, width, 3] in RGB, got {described}")
    if image.size == 0:
        raise ValueError(f"an image must not be empty, got shape {list(image.shape)}")


def smart_resize(height: int, width: int, config: VisionConfig) -> tuple[int, int]:
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
