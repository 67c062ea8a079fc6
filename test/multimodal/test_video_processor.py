# SPDX-License-Identifier: Apache-2.0
"""Values of transformers 5.23: Qwen3VLVideoProcessor, Qwen2VLVideoProcessor.

Parity tests compare with the library itself.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from edgellm_ros.multimodal.patch_processor import PatchProcessor
from edgellm_ros.multimodal.video import Video
from edgellm_ros.multimodal.video_config import VideoConfig
from edgellm_ros.multimodal.video_processor import VideoGrid, VideoProcessor
from fixtures.pixel_values import group_pixel_values, pixel_values
from fixtures.reference_inputs import make_image
from fixtures.vision_config import CONFIG

VIDEOS = VideoConfig(
    token_id=5,
    processor="qwen3_vl",
    timestamps="text",
    tokens_per_second=0.0,
    min_pixels=20000,
    max_pixels=200000,
    max_video_tokens=0,
    min_frames=4,
    max_frames=20,
    resample=3,
    rescale_factor=1 / 255,
    image_mean=CONFIG.image_mean,
    image_std=CONFIG.image_std,
)


def processor(tower=CONFIG, **changes) -> VideoProcessor:
    config = dataclasses.replace(VIDEOS, **changes)
    return VideoProcessor(dataclasses.replace(tower, video=config), config)


@pytest.mark.parametrize(
    ("kind", "frames", "height", "width", "cap", "expected"),
    [
        ("qwen3_vl", 2, 480, 640, 0, (256, 352)),
        ("qwen3_vl", 3, 480, 640, 0, (192, 288)),
        ("qwen3_vl", 5, 480, 640, 0, (160, 224)),
        ("qwen3_vl", 16, 480, 640, 0, (96, 128)),
        ("qwen3_vl", 5, 224, 192, 0, (224, 192)),
        ("qwen3_vl", 2, 20, 30, 0, (96, 128)),
        ("qwen3_vl", 7, 10, 900, 0, (32, 1600)),
        ("qwen3_vl", 4, 480, 640, 40, (160, 224)),
        ("qwen3_vl", 9, 480, 640, 30, (128, 160)),
        ("qwen2_vl", 2, 480, 640, 0, (384, 512)),
        ("qwen2_vl", 16, 480, 640, 0, (384, 512)),
        ("qwen2_vl", 2, 20, 30, 0, (128, 192)),
        ("qwen2_vl", 7, 10, 900, 0, (32, 1344)),
        ("qwen2_vl", 4, 480, 640, 40, (96, 160)),
        ("qwen2_vl", 9, 480, 640, 30, (96, 160)),
    ],
)
def test_frames_are_resized_within_the_limits_of_their_processor(kind, frames, height, width, cap, expected):
    grid = processor(processor=kind, max_video_tokens=cap).grid(frames, height, width)
    assert (32 * grid.rows, 32 * grid.columns) == expected
    assert grid.groups == -(-frames // 2)


@pytest.mark.parametrize(
    ("kind", "total", "file_fps", "fps", "expected"),
    [
        ("qwen3_vl", 100, 30.0, 2.0, [0, 20, 40, 59, 79, 99]),
        ("qwen3_vl", 7, 10.0, 2.0, [0, 2, 4, 6]),
        ("qwen3_vl", 100, 30.0, 30.0, list(np.linspace(0, 99, 20).round())),
        ("qwen2_vl", 100, 30.0, 2.0, [0, 16, 33, 50, 66, 83]),
        ("qwen2_vl", 7, 10.0, 2.0, [0, 1, 3, 5]),
        ("qwen2_vl", 100, 30.0, 30.0, list(range(0, 100, 5))),
    ],
)
def test_frames_of_a_file_are_sampled_as_their_processor_does(kind, total, file_fps, fps, expected):
    assert processor(processor=kind).sample(total, file_fps, fps) == expected


def test_a_file_with_fewer_frames_than_a_group_is_refused():
    with pytest.raises(ValueError, match="the file has 1 frames, expected at least 2"):
        processor(processor="qwen2_vl").sample(1, 30.0, 2.0)


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_vl"])
def test_a_frame_too_thin_is_refused(kind):
    with pytest.raises(ValueError, match="differ by a factor of at most 200, got 10000x40"):
        processor(processor=kind).grid(2, 40, 10000)


def test_a_patch_has_the_values_of_both_frames_channel_by_channel():
    tower = dataclasses.replace(CONFIG, min_pixels=96 * 128, max_pixels=96 * 128)
    one, other = make_image(96, 128), make_image(96, 128)[::-1]
    values = group_pixel_values(processor(tower, max_pixels=10**6), Video([one, other], fps=2), 0)
    values = values.reshape(-1, 3, 2, 16 * 16)
    for place, frame in enumerate((one, other)):
        expected = pixel_values(PatchProcessor(tower), frame).reshape(-1, 3, 16 * 16)
        np.testing.assert_allclose(values[:, :, place], expected, atol=1e-6)


def test_the_last_frame_of_an_odd_number_is_repeated():
    frames = [make_image(96, 128 + 32 * i)[:, :128] for i in range(3)]
    odd, even = (Video([*frames, *more], [0.0, 1.0, 2.0, 3.0][: 3 + len(more)]) for more in ([], frames[2:]))
    videos = processor(max_pixels=10**6)
    assert videos.grid(3, 96, 128) == videos.grid(4, 96, 128) == VideoGrid(2, 3, 4)
    np.testing.assert_array_equal(*(group_pixel_values(videos, video, 1) for video in (odd, even)))
    threes = processor(dataclasses.replace(CONFIG, temporal_patch_size=3))
    assert [frame is frames[1] for frame in threes.group(Video(frames[:2], fps=2), 0)] == [False, True, True]


def test_the_time_of_a_group_is_the_mean_of_its_first_and_last_frame():
    frames = [make_image(32, 32)] * 5
    assert processor().group_times(Video(frames, [1.0, 2.0, 4.0, 7.0, 8.0])) == [1.5, 5.5, 8.0]
    tower = dataclasses.replace(CONFIG, temporal_patch_size=3)
    assert processor(tower).group_times(Video(frames, [1.0, 2.0, 4.0, 7.0, 8.0])) == [2.5, 7.5]


def test_positions_of_groups_are_their_seconds_whole_or_exact():
    video = Video([make_image(32, 32)] * 5, fps=1.6)  # groups 1.25 s apart
    positions = {
        timestamps: processor(timestamps=timestamps, tokens_per_second=rate).group_positions(video)
        for timestamps, rate in (("text", 0.0), ("positions", 2.0), ("exact_positions", 2.0))
    }
    assert positions == {"text": (0, 0, 0), "positions": (0, 2, 5), "exact_positions": (0, 2.5, 5)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"processor": "clip"}, "processor must be one of qwen2_vl, qwen3_vl, got 'clip'"),
        (
            {"timestamps": "none"},
            "timestamps must be one of text, positions, exact_positions, whole_positions, got 'none'",
        ),
        ({"timestamps": "positions"}, "tokens_per_second must be positive .* as positions, got 0.0"),
        ({"tokens_per_second": 2.0}, "tokens_per_second must be 0 with timestamps as text, got 2.0"),
        ({"max_pixels": 10}, "max_pixels 10 is less than min_pixels 20000"),
        ({"max_frames": 3}, "max_frames 3 is less than min_frames 4"),
        ({"min_frames": 0}, "min_frames must be at least 1, got 0"),
        ({"max_video_tokens": -1}, "max_video_tokens must not be negative, got -1"),
        ({"sound_chunk": -1}, "sound_chunk must not be negative, got -1"),
        ({"rescale_factor": 0.0}, "rescale_factor must be positive, got 0.0"),
        ({"image_mean": (0.5,)}, "image_mean must have 3 values"),
        ({"image_std": (0.5, 0.0, 0.5)}, "image_std must be positive"),
    ],
)
def test_an_invalid_configuration_is_refused_with_the_value(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(VIDEOS, **changes)
