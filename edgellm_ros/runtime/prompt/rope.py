# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: positions of tokens, and the table of angles.

Reference: transformers, Qwen3OmniMoe: get_rope_index and Qwen3OmniMoeThinkerTextRotaryEmbedding. For videos,
get_rope_index of Qwen2_5_VLModel and Qwen3VLModel too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgellm_ros.engine.device import Device
from edgellm_ros.engine_directory.rope_config import RopeConfig
from edgellm_ros.kernels import RopeTable


def make_rope_table(config: RopeConfig, positions: int, device: Device) -> RopeTable:
    """Compute scaled cos and sin of all frequencies at positions 0 to positions - 1.

    The angles are float32, as in the reference.
    """
    frequencies = np.array(config.frequencies, np.float32)
    angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies
    scaling = np.float32(config.attention_scaling)
    table = RopeTable(*(device.empty(array.shape, np.float32) for array in (angles, angles, frequencies)))
    device.upload(table.cos, np.cos(angles) * scaling)
    device.upload(table.sin, np.sin(angles) * scaling)
    device.upload(table.frequencies, frequencies)
    return table


def plain_rope_index(tokens: int) -> np.ndarray:
    """Return positions [3, S] float32 without mRoPE: 0, 1, 2, ... on all axes."""
    return np.broadcast_to(np.arange(tokens, dtype=np.float32), (3, tokens))


@dataclass(frozen=True)
class VisionBlock:
    """Placeholders in a row of one image, or of a video's groups of frames."""

    rows: int  # of tokens of a group
    columns: int
    times: tuple[float, ...] = (0.0,)  # of each group on the time axis, from the first group's
    text_after_times: bool = False  # whether the text after the block continues after its times too

    @property
    def tokens(self) -> int:
        return len(self.times) * self.rows * self.columns

    def positions(self) -> np.ndarray:
        """Return the positions [3, tokens] float32 (time, height, width).

        The position of the first token counts as 0.
        """
        groups, rows, columns = len(self.times), self.rows, self.columns
        steps = np.arange(max(rows, columns), dtype=np.float32)
        times = np.repeat(np.array(self.times, np.float32), rows * columns)
        height = np.tile(np.repeat(steps[:rows], columns), groups)
        return np.stack([times, height, np.tile(steps[:columns], groups * rows)])


@dataclass(frozen=True, eq=False)
class SoundedBlock:
    """Placeholders of a video and its sound, between the tokens of a sound's ends."""

    token_ids: tuple[int, ...]
    positions: np.ndarray  # [3, tokens] float32, from the position after the token before
    length: float  # positions after which the text continues


def get_rope_index(
    token_ids: Sequence[int],
    grids: Sequence[tuple[int, int]],
    image_token_id: int | None,
    vision_start_token_id: int | None,
    video_blocks: Sequence[VisionBlock | SoundedBlock] = (),
    video_token_id: int | None = None,
) -> tuple[np.ndarray, float]:
    """Return a prompt's positions [3, S] float32 (time, height, width) and the delta.

    `grids`: height and width of each image in tokens (after merging). The positions of text and sound
    increase by one on all axes. The tokens of an image share a time; their height and width are row and
    column, counted from the position after the preceding text. Text after an image continues after the
    largest height or width of the image. The groups of a block have the time of an image plus their own; as
    in the references, text continues after these times for some models only. A generated token at sequence
    index i has position i + delta, which is after all positions of the prompt.
    ValueError if the ids do not contain exactly these images and blocks.
    """
    positions = np.empty((3, len(token_ids)), np.float32)
    ids = np.asarray(token_ids)
    images = [VisionBlock(height, width) for height, width in grids]
    sounded = {block.token_ids[0] for block in video_blocks if isinstance(block, SoundedBlock)}
    # index of the first token, token, block
    blocks: list[tuple[int, int | None, VisionBlock | SoundedBlock]] = []
    for token, first_ids, expected, what in (
        (image_token_id, {image_token_id}, images, "images"),
        (video_token_id, {video_token_id, *sounded}, video_blocks, "blocks of video frames"),
    ):
        begins = np.isin(ids[1:], [each for each in first_ids if each is not None])
        starts = np.flatnonzero((ids[:-1] == vision_start_token_id) & begins) + 1
        if len(starts) != len(expected):
            raise ValueError(f"the prompt has {len(starts)} {what}, expected {len(expected)}")
        blocks += [(start, token, block) for start, block in zip(starts.tolist(), expected, strict=True)]
    index, position = 0, np.float32(0)
    for start, token, block in sorted(blocks, key=lambda entry: entry[0]):
        positions[:, index:start] = position + np.arange(start - index, dtype=np.float32)
        position += np.float32(start - index)
        if isinstance(block, SoundedBlock):
            index = start + len(block.token_ids)
            if not np.array_equal(ids[start:index], block.token_ids):
                raise ValueError(f"a video with sound needs {len(block.token_ids)} tokens in a row")
            positions[:, start:index] = position + block.positions
            position += np.float32(block.length)
            continue
        groups, rows, columns = len(block.times), block.rows, block.columns
        index = start + block.tokens
        if index > len(ids) or not (ids[start:index] == token).all():
            size = f"{groups} x {rows} x {columns}" if groups > 1 else f"{rows} x {columns}"
            raise ValueError(f"an image of {size} tokens needs {block.tokens} placeholders in a row")
        positions[:, start:index] = position + block.positions()
        last = position + np.float32(max(rows, columns) - 1)
        position = (max(last, positions[0, index - 1]) if block.text_after_times else last) + np.float32(1)
    positions[:, index:] = position + np.arange(len(ids) - index, dtype=np.float32)
    return positions, float(positions.max(initial=-1) + np.float32(1 - len(ids)))
