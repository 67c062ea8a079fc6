# SPDX-License-Identifier: Apache-2.0
"""The interface of image processors, and the choice of one for a kind of tower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from edgellm_ros.multimodal.image_pixels import ResizedImage
from edgellm_ros.multimodal.patch_processor import PatchProcessor
from edgellm_ros.multimodal.tile_processor import TileProcessor
from edgellm_ros.multimodal.vision_config import InternVLVisionConfig, VisionConfig


class ImageProcessor(Protocol):
    """Says how images become the vision tower's inputs; `Kernels` computes the pixels.

    All methods raise ValueError for an image that the tower does not take.
    """

    config: VisionConfig
    levels: np.ndarray  # [C, 256] float32, the normalised value of each of a channel's 256 values

    def token_grid(self, height: int, width: int) -> tuple[int, int]:
        """Compute rows and columns of tokens of an image of this many pixels."""
        ...

    def resized(self, height: int, width: int) -> Sequence[ResizedImage]:
        """Compute the sizes to which an image of this many pixels is resized.

        Patches of these sizes follow each other in the tower's pixel_values.
        """
        ...

    def grid_inputs(self, token_grid: tuple[int, int]) -> Mapping[str, np.ndarray]:
        """Compute the tower's other inputs, which depend on the grid alone."""
        ...


def make_image_processor(config: VisionConfig) -> ImageProcessor:
    """Make the image processor of a kind of vision tower."""
    return TileProcessor(config) if isinstance(config, InternVLVisionConfig) else PatchProcessor(config)
