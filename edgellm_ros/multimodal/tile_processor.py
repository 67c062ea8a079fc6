# SPDX-License-Identifier: Apache-2.0
"""Processes images for InternVL's vision tower: a grid of tiles of one size.

Reference: transformers, GotOcr2ImageProcessorPil, which InternVL's processor uses with `crop_to_patches`.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from edgellm_ros.kernels.protocol import PatchLayout
from edgellm_ros.multimodal.image_pixels import ResizedImage, image_levels
from edgellm_ros.multimodal.vision_config import InternVLVisionConfig


class TileProcessor:
    """An `ImageProcessor` that stretches an image to the nearest grid of tiles."""

    def __init__(self, config: InternVLVisionConfig) -> None:
        self.config = config
        self.levels = image_levels(config)

    def token_grid(self, height: int, width: int) -> tuple[int, int]:
        """Compute the number of tiles, and the number of tokens of a tile."""
        rows, columns = best_tile_grid(height, width, self.config)
        tiles = rows * columns
        return tiles + (tiles > 1), self.config.tile_tokens

    def resized(self, height: int, width: int) -> list[ResizedImage]:
        """Return the grid of tiles, row by row.

        If there are several, the whole image follows as one more tile.
        """
        rows, columns = best_tile_grid(height, width, self.config)
        size, patch, block = self.config.tile_size, self.config.patch_size, self.config.size_factor
        tile = PatchLayout(size, size, patch, block)
        grid = ResizedImage(rows * size, columns * size, tile)
        return [grid] if rows * columns == 1 else [grid, ResizedImage(size, size, tile)]

    def grid_inputs(self, token_grid: tuple[int, int]) -> dict[str, np.ndarray]:
        """Return no inputs: positions of patches are constants of the graph."""
        return {}


def best_tile_grid(height: int, width: int, config: InternVLVisionConfig) -> tuple[int, int]:
    """Choose rows and columns of tiles for an image.

    The grid has min_tiles to max_tiles tiles, and of these the aspect ratio nearest to the image's. Of equal
    ones the grid with fewer tiles is chosen, unless the image has more than half of the larger grid's pixels.
    Without any grid of min_tiles to max_tiles tiles it is one tile.
    """
    if config.max_tiles == 1:
        return 1, 1
    ratio, area = width / height, width * height
    best, nearest = (1, 1), float("inf")
    for rows, columns in _tile_grids(config.min_tiles, config.max_tiles):
        distance = abs(ratio - columns / rows)
        covered = config.tile_size**2 * rows * columns
        if distance < nearest or (distance == nearest and area > 0.5 * covered):
            best, nearest = (rows, columns), distance
    return best


@lru_cache(maxsize=8)
def _tile_grids(low: int, high: int) -> list[tuple[int, int]]:
    """List rows and columns of all grids of `low` to `high` tiles.

    Grids are in the reference's order.
    """
    sides = range(1, high + 1)
    grids = [(rows, columns) for columns in sides for rows in sides if low <= rows * columns <= high]
    return sorted(grids, key=lambda grid: grid[0] * grid[1])
