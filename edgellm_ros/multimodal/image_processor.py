# SPDX-License-Identifier: Apache-2.0
"""The interface of image processors, and the choice of one for a kind of tower."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from edgellm_ros.multimodal.patch_processor import PatchProcessor
from edgellm_ros.multimodal.tile_processor import TileProcessor
from edgellm_ros.multimodal.vision_config import InternVLVisionConfig, VisionConfig


class ImageProcessor(Protocol):
    """Converts images [H, W, 3] uint8 RGB to inputs of the vision tower.

    All methods raise ValueError for an image that the tower does not take.
    """

    def token_grid(self, height: int, width: int) -> tuple[int, int]:
        """Compute rows and columns of tokens of an image of this many pixels."""
        ...

    @property
    def levels(self) -> np.ndarray:
        """Return the normalised value of each channel's 256 values: [C, 256] float32."""
        ...

    def patches(self, image: np.ndarray) -> np.ndarray:
        """Compute the tower's pixel_values before they are normalised, uint8.

        See `VisionTower.pixels_shape`.
        """
        ...

    def grid_inputs(self, token_grid: tuple[int, int]) -> Mapping[str, np.ndarray]:
        """Compute the tower's other inputs, which depend on the grid alone."""
        ...


def make_image_processor(config: VisionConfig) -> ImageProcessor:
    """Make the image processor of a kind of vision tower."""
    return TileProcessor(config) if isinstance(config, InternVLVisionConfig) else PatchProcessor(config)
