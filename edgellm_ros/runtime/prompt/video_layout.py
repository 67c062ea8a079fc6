# SPDX-License-Identifier: Apache-2.0
"""VideoLayout: the tokens and positions of a video in a prompt.

Qwen3-VL writes the time of each group of frames as words; Qwen2.5-VL and the Omni models write one row of
placeholders, and the time is a position. Reference: transformers, Qwen3VLProcessor, Qwen2_5_VLProcessor,
Qwen2_5OmniProcessor and Qwen3OmniMoeProcessor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from edgellm_ros.engine_directory.config import SpecialTokens
from edgellm_ros.multimodal.video import Video
from edgellm_ros.multimodal.video_config import AS_TEXT, OMNI_POSITIONS, VideoConfig
from edgellm_ros.multimodal.video_processor import VideoGrid, VideoProcessor
from edgellm_ros.runtime.prompt.rope import SoundedBlock, VisionBlock
from edgellm_ros.runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class VideoLayout:
    """How a video is part of a prompt."""

    grid: VideoGrid
    token_ids: tuple[int, ...]  # in place of the template's placeholder
    blocks: tuple[VisionBlock | SoundedBlock, ...]  # rows of placeholders
    times: tuple[float, ...]  # of each group on mRoPE's time axis, from the first group's


def lay_out_video(
    video: Video,
    grid: VideoGrid,
    processor: VideoProcessor,
    config: VideoConfig,
    tokenizer: Tokenizer,
    special_tokens: SpecialTokens,
) -> VideoLayout:
    """Compute the layout of a video.

    As words, the tokens of a group are "<1.5 seconds>", vision_start, placeholders, vision_end. As in the
    reference, the tokens that the template writes before and after its placeholder remain.
    """
    times = processor.group_positions(video)
    if config.timestamps != AS_TEXT:
        after = config.timestamps in OMNI_POSITIONS
        block = VisionBlock(grid.rows, grid.columns, times, text_after_times=after)
        return VideoLayout(grid, (config.token_id,) * grid.tokens, (block,), times)
    start, end = special_tokens.vision_start_token_id, special_tokens.vision_end_token_id
    assert start is not None
    assert end is not None  # EngineConfig checks both
    ids: list[int] = []
    for seconds in processor.group_times(video):
        words = tokenizer.encode(f"<{seconds:.1f} seconds>")
        ids += [*words, start, *[config.token_id] * grid.group_tokens, end]
    group = VisionBlock(grid.rows, grid.columns)
    return VideoLayout(grid, tuple(ids), (group,) * grid.groups, times)


def lay_out_video_with_sound(
    video: Video,
    grid: VideoGrid,
    processor: VideoProcessor,
    config: VideoConfig,
    special_tokens: SpecialTokens,
    sound_tokens: int,
) -> VideoLayout:
    """Compute the layout of a video with a sound of `sound_tokens` tokens.

    The sound begins at the first frame. Frames and sound are cut into chunks of `sound_chunk` positions. The
    placeholders of a chunk's frames are followed by those of its sound, between the tokens audio_start and
    audio_end. A token of the sound takes one position on all axes, counted from the same as the times, rows
    and columns of the frames. As in the reference, audio_start has the position of the token before it,
    audio_end that of the token after it, and the text continues after the last chunk, whatever has higher
    positions before.
    """
    times = processor.group_positions(video)
    start, end = special_tokens.audio_start_token_id, special_tokens.audio_end_token_id
    sound = special_tokens.audio_token_id
    assert start is not None
    assert end is not None
    assert sound is not None  # EngineConfig checks all three
    seen = VisionBlock(grid.rows, grid.columns, times).positions()
    heard = np.broadcast_to(np.arange(sound_tokens, dtype=np.float32), (3, sound_tokens))
    ids, positions = [start], [np.full((3, 1), -1, np.float32)]
    for turns in zip_longest(*(_cut(rows[0], config.sound_chunk) for rows in (seen, heard))):
        for turn, token, rows in zip(turns, (config.token_id, sound), (seen, heard), strict=True):
            if turn is not None:
                positions.append(rows[:, turn])
                ids += [token] * positions[-1].shape[1]
    length = positions[-1].max() + np.float32(1)
    positions.append(np.full((3, 1), length))
    block = SoundedBlock((*ids, end), np.concatenate(positions, axis=1), float(length))
    return VideoLayout(grid, block.token_ids, (block,), times)


def _cut(times: np.ndarray, size: int) -> Iterator[slice]:
    """Cut tokens, by their times [n] from 0 on, into chunks of `size`.

    The reference begins at most one chunk with each token, so a chunk of one token stands for each one that
    a gap between frames leaves empty.
    """
    first, end = 0, size
    for index, time in enumerate(times.tolist()):
        if time >= end:
            yield slice(first, index)
            first, end = index, end + size
    yield slice(first, len(times))
