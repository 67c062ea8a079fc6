# SPDX-License-Identifier: Apache-2.0
"""Positions of an image's patches as inputs of the vision tower.

The positions depend only on the grid. Reference: transformers, Qwen3OmniMoeVisionEncoder (bilinear resampling
of the learned position grid with aligned corners) and Qwen3OmniMoeVisionRotaryEmbedding (a quarter of the
head size for the row, a quarter for the column).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgellm_ros.multimodal.vision_config import Qwen3VisionConfig


@dataclass(frozen=True)
class VisionPositions:
    """Positions of P patches; fields have the names of the graph's inputs."""

    rope_cos: np.ndarray  # [P, D/2] float32
    rope_sin: np.ndarray  # [P, D/2] float32
    pos_embed_index: np.ndarray  # [4, P] int64
    pos_embed_weight: np.ndarray  # [4, P] float32


def vision_positions(grid_height: int, grid_width: int, config: Qwen3VisionConfig) -> VisionPositions:
    """Compute positions for a grid of patches, merge block by merge block."""
    rows, columns = _merge_order(grid_height, grid_width, config.spatial_merge_size)
    quarter = config.head_dim // 4
    exponents = np.arange(0, 2 * quarter, 2, dtype=np.float32) / np.float32(2 * quarter)
    inverse = (1.0 / np.float32(config.rope_theta) ** exponents).astype(np.float32)
    angles = np.concatenate([rows[:, None] * inverse, columns[:, None] * inverse], axis=1).astype(np.float32)
    index, weight = _interpolation(rows, columns, grid_height, grid_width, config.grid_side)
    return VisionPositions(np.cos(angles), np.sin(angles), index, weight)


def _merge_order(grid_height: int, grid_width: int, merge: int) -> tuple[np.ndarray, np.ndarray]:
    """List row and column of every patch, [P] float32 each."""
    rows, columns = np.meshgrid(np.arange(grid_height), np.arange(grid_width), indexing="ij")
    blocks = (grid_height // merge, merge, grid_width // merge, merge)
    ordered = [axis.reshape(blocks).transpose(0, 2, 1, 3).reshape(-1) for axis in (rows, columns)]
    return ordered[0].astype(np.float32), ordered[1].astype(np.float32)


def _interpolation(
    rows: np.ndarray, columns: np.ndarray, grid_height: int, grid_width: int, side: int
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the four grid indices around each patch, and their weights.

    [4, P] each; side: side of the learned grid.
    """
    (top, row_shares), (left, column_shares) = (
        _taps(rows, grid_height, side),
        _taps(columns, grid_width, side),
    )
    index = [top[i] * side + left[j] for i in (0, 1) for j in (0, 1)]
    weight = [row_shares[i] * column_shares[j] for i in (0, 1) for j in (0, 1)]
    return np.stack(index), np.stack(weight)


def _taps(position: np.ndarray, size: int, side: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    source = position * np.float32(side - 1) / np.float32(max(size - 1, 1))
    below = np.floor(source)
    share = source - below
    indices = [np.clip(below.astype(np.int64) + offset, 0, side - 1) for offset in (0, 1)]
    return indices, [np.float32(1) - share, share]
