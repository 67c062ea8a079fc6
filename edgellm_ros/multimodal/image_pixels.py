# SPDX-License-Identifier: Apache-2.0
"""What image processors share: checks, normalised values, sizes after resizing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgellm_ros.kernels.protocol import PatchLayout
from edgellm_ros.multimodal.device_image import DeviceImage, Image
from edgellm_ros.multimodal.vision_config import VisionTower


def check_image(image: Image) -> None:
    """Check that an image is [H, W, 3] uint8 with at least one pixel.

    The type of one on a GPU is checked when it is read. ValueError otherwise.
    """
    is_image = isinstance(image, (np.ndarray, DeviceImage))
    if not is_image or image.dtype != np.uint8 or len(image.shape) != 3 or image.shape[2] != 3:
        described = f"{image.dtype} {list(image.shape)}" if is_image else type(image).__name__
        raise ValueError(f"an image must be a uint8 array [height, width, 3] in RGB, got {described}")
    if 0 in image.shape:
        raise ValueError(f"an image must not be empty, got shape {list(image.shape)}")


def image_levels(config: VisionTower) -> np.ndarray:
    """Compute the normalised value of each of a pixel's 256 values: [C, 256] float32."""
    # in the reference's order of roundings
    levels = (np.arange(256, dtype=np.float64) * config.rescale_factor).astype(np.float32)
    mean, std = np.array(config.image_mean, np.float32), np.array(config.image_std, np.float32)
    return (levels[None, :] - mean[:, None]) / std[:, None]


@dataclass(frozen=True)
class ResizedImage:
    """A size to which an image is resized, and how the result is cut into patches.

    Sizes are in pixels.
    """

    height: int
    width: int
    layout: PatchLayout


def whole_image(config: VisionTower, height: int, width: int) -> ResizedImage:
    """Return an image of this size that is not cut into tiles."""
    return ResizedImage(height, width, PatchLayout(height, width, config.patch_size, config.size_factor))
