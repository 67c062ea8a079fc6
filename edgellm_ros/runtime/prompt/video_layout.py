# SPDX-License-Identifier: Apache-2.0
"""VideoLayout: the tokens and positions of a video in a prompt.

Qwen3-VL writes the time of each group of frames as words; Qwen2.5-VL and Qwen3-Omni write one row of
placeholders, and the time is a position. Reference: transformers, Qwen3VLProcessor, Qwen2_5_VLProcessor and
Qwen3OmniMoeProcessor.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgellm_ros.engine_directory.config import SpecialTokens
from edgellm_ros.multimodal.video import Video
from edgellm_ros.multimodal.video_config import AS_EXACT_POSITIONS, AS_TEXT, VideoConfig
from edgellm_ros.multimodal.video_processor import VideoGrid, VideoProcessor
from edgellm_ros.runtime.prompt.rope import VisionBlock
from edgellm_ros.runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class VideoLayout:
    """How a video is part of a prompt."""

    grid: VideoGrid
    token_ids: tuple[int, ...]  # in place of the template's placeholder
    blocks: tuple[VisionBlock, ...]  # rows of placeholders
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
        exact = config.timestamps == AS_EXACT_POSITIONS
        block = VisionBlock(grid.rows, grid.columns, times, text_after_times=exact)
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
