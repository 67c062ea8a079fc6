# SPDX-License-Identifier: Apache-2.0
"""Positions of an image's patches as inputs of the vision tower.

The positions depend only on the grid. Reference: transformers, Qwen3OmniMoeVisionEncoder (bilinear resampling
of the learned position grid with aligned corners), Qwen3OmniMoeVisionRotaryEmbedding (a quarter of the
head size for the row, a quarter for the column) and get_vision_window_index; Siglip2VisionEmbeddings
(resampling with a filter, as of PyTorch's `interpolate` with `antialias`).
"""

from __future__ import annotations

import numpy as np

from edgellm_ros.multimodal.vision_config import (
    Qwen2_5VisionConfig,
    Qwen3VisionConfig,
    QwenVisionTower,
    Siglip2VisionConfig,
)

PositionedTower = Qwen3VisionConfig | Qwen2_5VisionConfig | Siglip2VisionConfig


def vision_positions(grid_height: int, grid_width: int, config: PositionedTower) -> dict[str, np.ndarray]:
    """Compute positions for a grid of P patches, merge block by merge block.

    Keys are the names of the graph's inputs:
    - pos_embed_shares [P, N] float32: of SigLIP 2 alone, the share of each point of the learned position grid
    - rope_cos, rope_sin [P, D/2] float32
    - pos_embed_index [4, P] int64, pos_embed_weight [4, P] float32: for a learned position grid
    - window_index [W, L] int64, window_mask [W, 1, L, L] bool, patch_index [P] int64: for blocks with
      windows, see `windows`
    """
    rows, columns = _merge_order(grid_height, grid_width, config.spatial_merge_size)
    if isinstance(config, Siglip2VisionConfig):
        row_shares, column_shares = (
            _filtered(size, config.grid_side)[places.astype(np.int64)]
            for size, places in ((grid_height, rows), (grid_width, columns))
        )
        shares = row_shares[:, :, None] * column_shares[:, None, :]
        return {"pos_embed_shares": shares.reshape(len(rows), -1)}
    inputs = _rotary(rows, columns, config)
    if isinstance(config, Qwen3VisionConfig):
        index, weight = _interpolation(rows, columns, grid_height, grid_width, config.grid_side)
        return inputs | {"pos_embed_index": index, "pos_embed_weight": weight}
    return inputs | windows(rows, columns, config) if config.has_windows else inputs


def windows(rows: np.ndarray, columns: np.ndarray, config: Qwen2_5VisionConfig) -> dict[str, np.ndarray]:
    """Distribute P patches, given by row and column, over W windows of L patches.

    Windows at the right and lower edge of an image may have fewer than L patches.

    - window_index [W, L] int64: the patches of each window; 0 where a window has none
    - window_mask [W, 1, L, L] bool: True where a window has a patch, the same for all L rows, as ONNX Runtime
      takes no mask [W, 1, 1, L]
    - patch_index [P] int64: the place of each patch in the windows, counted window by window
    """
    side = config.window_tokens * config.spatial_merge_size  # in patches
    window_rows, window_columns = rows.astype(np.int64) // side, columns.astype(np.int64) // side
    window = window_rows * (window_columns.max() + 1) + window_columns
    order, counts = np.argsort(window, kind="stable"), np.bincount(window)
    size = config.window_patches
    filled = np.arange(size) < counts[:, None]
    index = np.zeros(filled.shape, np.int64)
    index[filled] = order
    place = np.empty(len(order), np.int64)
    place[order] = np.flatnonzero(filled)
    mask = filled[:, None, None].repeat(size, axis=2)
    return {"window_index": index, "window_mask": mask, "patch_index": place}


def _rotary(rows: np.ndarray, columns: np.ndarray, config: QwenVisionTower) -> dict[str, np.ndarray]:
    """Compute cos and sin of each patch.

    Half of the angles are from its row and half from its column.
    """
    quarter = config.head_dim // 4
    exponents = np.arange(0, 2 * quarter, 2, dtype=np.float32) / np.float32(2 * quarter)
    inverse = (1.0 / np.float32(config.rope_theta) ** exponents).astype(np.float32)
    angles = np.concatenate([rows[:, None] * inverse, columns[:, None] * inverse], axis=1).astype(np.float32)
    return {"rope_cos": np.cos(angles), "rope_sin": np.sin(angles)}


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


def _filtered(size: int, side: int) -> np.ndarray:
    """Compute the shares [size, side] float32 of points in resampled ones.

    side, size: number of points, and of resampled ones. The filter is a triangle, as wide as the larger of
    both distances between points.
    """
    scale = side / size
    centres = scale * (np.arange(size) + 0.5)
    distances = np.abs(np.arange(side) + 0.5 - centres[:, None]) / max(scale, 1.0)
    shares = np.maximum(0.0, 1.0 - distances)
    return (shares / shares.sum(axis=1, keepdims=True)).astype(np.float32)
