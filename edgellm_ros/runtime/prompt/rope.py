# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: positions of tokens, and the table of angles.

Reference: transformers, Qwen3OmniMoe: get_rope_index and Qwen3OmniMoeThinkerTextRotaryEmbedding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgellm_ros.engine.device import Device
from edgellm_ros.engine_directory.config import RopeConfig
from edgellm_ros.kernels import RopeTable


def make_rope_table(config: RopeConfig, positions: int, device: Device) -> RopeTable:
    """Compute scaled cos and sin of all frequencies at positions 0 to positions - 1.

    The angles are float32, as in the reference.
    """
    frequencies = np.array(config.frequencies, np.float32)
    angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies
    scaling = np.float32(config.attention_scaling)
    table = RopeTable(device.empty(angles.shape, np.float32), device.empty(angles.shape, np.float32))
    device.upload(table.cos, np.cos(angles) * scaling)
    device.upload(table.sin, np.sin(angles) * scaling)
    return table


def plain_rope_index(tokens: int) -> np.ndarray:
    """Return positions [3, S] int64 of a model without mRoPE: 0, 1, 2, ... on all axes."""
    return np.broadcast_to(np.arange(tokens), (3, tokens))


def get_rope_index(
    token_ids: Sequence[int],
    grids: Sequence[tuple[int, int]],
    image_token_id: int | None,
    vision_start_token_id: int | None,
) -> tuple[np.ndarray, int]:
    """Return positions [3, S] int64 (time, height, width) of a prompt, and the delta.

    `grids`: height and width of each image in tokens (after merging). The positions of text and sound
    increase by one on all axes. The tokens of an image share a time; their height and width are row and
    column, counted from the position after the preceding text. Text after an image continues after the
    largest position of the image. A generated token at sequence index i has position i + delta.
    ValueError if the ids do not contain exactly these images.
    """
    positions = np.empty((3, len(token_ids)), np.int64)
    ids = np.asarray(token_ids)
    starts = np.flatnonzero((ids[:-1] == vision_start_token_id) & (ids[1:] == image_token_id)) + 1
    if len(starts) != len(grids):
        raise ValueError(f"the prompt has {len(starts)} images, expected {len(grids)}")
    index = position = 0
    for start, (height, width) in zip(starts.tolist(), grids, strict=True):
        positions[:, index:start] = position + np.arange(start - index)
        position += start - index
        index = start + height * width
        if index > len(ids) or not (ids[start:index] == image_token_id).all():
            raise ValueError(
                f"an image of {height} x {width} tokens needs {height * width} placeholders in a row"
            )
        positions[0, start:index] = position
        positions[1, start:index] = position + np.repeat(np.arange(height), width)
        positions[2, start:index] = position + np.tile(np.arange(width), height)
        position += max(height, width)
    positions[:, index:] = position + np.arange(len(ids) - index)
    return positions, int(position - index)
