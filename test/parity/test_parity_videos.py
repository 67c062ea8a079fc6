# SPDX-License-Identifier: Apache-2.0
"""Video processors of transformers: defaults, sizes and sampled frames.

The tests of the families compare engines.
"""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import image_processing_backends  # noqa: E402
from transformers.image_utils import SizeDict  # noqa: E402
from transformers.video_utils import VideoMetadata  # noqa: E402
from video_reference import Qwen2VLVideoProcessor, Qwen3VLVideoProcessor  # noqa: E402

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection  # noqa: E402
from edgellm_ros.builder.config.video_processing import read_video  # noqa: E402
from edgellm_ros.multimodal.video_processor import VideoProcessor  # noqa: E402
from edgellm_ros.multimodal.vision_config import Qwen3VisionConfig  # noqa: E402
from fixtures.tiny_checkpoint import write_json  # noqa: E402

CLASSES = [Qwen2VLVideoProcessor, Qwen3VLVideoProcessor]


@pytest.fixture(params=CLASSES, ids=lambda cls: cls.__name__)
def reference(request):
    return request.param


@pytest.fixture
def video_of(reference, tmp_path):
    """`video_of(keys)`: a checkpoint's configuration of these keys, and its processor."""

    def make(keys: dict) -> tuple:
        write_json(tmp_path / "video_preprocessor_config.json", keys)
        patch = keys.get("patch_size", reference.patch_size)
        sizes = {"patch_size": patch, "temporal_patch_size": 2, "spatial_merge_size": 2}
        tower = ConfigSection(sizes, "config.json: vision_config")
        config = ConfigSection({"video_token_id": 5}, "config.json")
        video = read_video(tmp_path, config, tower, reference.__name__)
        tower = Qwen3VisionConfig(
            hidden_size=16, num_heads=2, depth=1, out_hidden_size=8, in_channels=3, patch_size=patch,
            spatial_merge_size=2, temporal_patch_size=2, rope_theta=1e4, min_pixels=1, max_pixels=1,
            num_position_embeddings=4, deepstack_visual_indexes=(), resample=3, rescale_factor=1 / 255,
            image_mean=video.image_mean, image_std=video.image_std, video=video,
        )  # fmt: skip
        return video, VideoProcessor(tower, video)

    return make


def test_defaults_are_those_of_the_class(reference, video_of):
    video, _ = video_of({})
    expected = reference()
    assert (video.min_pixels, video.max_pixels) == (expected.size.shortest_edge, expected.size.longest_edge)
    assert video.image_mean == tuple(expected.image_mean)
    assert video.image_std == tuple(expected.image_std)
    assert (video.min_frames, video.max_frames) == (expected.min_frames, expected.max_frames)
    assert (video.rescale_factor, video.resample) == (expected.rescale_factor, expected.resample)
    capped, _ = video_of({"cap_pixels_per_frame": True})
    assert capped.max_video_tokens == expected.max_video_tokens


def test_random_videos_are_resized_to_the_same_size(reference, video_of):
    rng = np.random.default_rng(0)
    for _ in range(200):
        frames, cap = int(rng.integers(2, 12)), bool(rng.integers(2))
        height, width = (int(side) for side in rng.integers(5, 700, 2))
        patch = int(rng.integers(4, 17))
        low = int(rng.integers(1, 40)) * patch**2
        size = {"shortest_edge": low, "longest_edge": low * int(rng.integers(1, 300))}
        keys = {"size": size, "patch_size": patch, "cap_pixels_per_frame": cap}
        keys["max_video_tokens"] = int(rng.integers(1, 200))
        _, processor = video_of(keys)
        with mock.patch.object(image_processing_backends.TorchvisionBackend, "resize") as resize:
            reference(**keys).resize(
                torch.zeros(1, frames, 3, height, width),
                SizeDict(**size),
                3,
                factor=2 * patch,
                temporal_factor=2,
                cap_pixels_per_frame=cap,
            )
        expected = resize.call_args.kwargs["size"]
        grid = processor.grid(frames, height, width)
        assert (2 * patch * grid.rows, 2 * patch * grid.columns) == (expected.height, expected.width)


def test_random_files_are_sampled_at_the_same_frames(reference, video_of):
    rng = np.random.default_rng(1)
    for _ in range(300):
        limits = {"min_frames": int(rng.integers(1, 8)), "max_frames": int(rng.integers(8, 300))}
        total, fps = int(rng.integers(2, 3000)), float(rng.choice([0.1, 0.5, 1, 2, 3, 8, 30]))
        file_fps = float(rng.choice([7.3, 10, 24, 29.97, 30, 59.94]))
        metadata = VideoMetadata(total, fps=file_fps)
        try:
            expected = reference(**limits).sample_frames(metadata, fps=fps)
        except (ValueError, ZeroDivisionError):  # fewer frames than a group
            continue
        _, processor = video_of(limits)
        assert processor.sample(total, file_fps, fps) == [int(index) for index in expected]
