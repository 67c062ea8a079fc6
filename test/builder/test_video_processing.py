# SPDX-License-Identifier: Apache-2.0
"""Where a checkpoint's video processor is read from, and what is refused."""

from __future__ import annotations

import json

import pytest

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection, read_section
from edgellm_ros.builder.config.video_processing import CLASSES, QWEN2_VL, QWEN3_VL, read_video
from edgellm_ros.builder.families import families
from edgellm_ros.builder.families.model import Model
from edgellm_ros.builder.weights.weights import Weights
from fixtures.changed_json import change
from fixtures.qwen3_vl_checkpoint import write_whole_omni_checkpoint
from fixtures.tiny_checkpoint import write_json, write_tiny_checkpoint
from fixtures.video_checkpoint import AREA, write_video_checkpoint

CONFIG = ConfigSection({"video_token_id": 7}, "config.json")
SIZES = {"temporal_patch_size": 2, "spatial_merge_size": 2}
QWEN3_TOWER = ConfigSection({"patch_size": 16, **SIZES}, "config.json: vision_config")
QWEN2_TOWER = ConfigSection({"patch_size": 14, **SIZES}, "config.json: vision_config")


def video_of(directory, tower=QWEN3_TOWER, **arguments):
    return read_video(directory, CONFIG, tower, QWEN3_VL, **arguments)


def read_model(checkpoint) -> Model:
    config = read_section(checkpoint / "config.json")
    family = next(each for each in families() if config.text("model_type") in each.model_types)
    return family.read(checkpoint, config, Weights(checkpoint))


def test_the_files_are_read_in_the_order_of_transformers(tmp_path):
    assert video_of(tmp_path) is None
    first, second, third = ({"size": {"shortest_edge": 1, "longest_edge": size}} for size in (10, 20, 30))
    write_json(tmp_path / "preprocessor_config.json", first)
    assert video_of(tmp_path).max_pixels == 10
    write_json(tmp_path / "video_preprocessor_config.json", second)
    assert video_of(tmp_path).max_pixels == 20
    write_json(tmp_path / "processor_config.json", {"image_processor": {}})
    assert video_of(tmp_path).max_pixels == 20
    write_json(tmp_path / "processor_config.json", {"video_processor": third})
    assert video_of(tmp_path).max_pixels == 30


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({}, QWEN3_VL),
        ({"video_processor_type": QWEN3_VL}, QWEN3_VL),
        ({"image_processor_type": "Qwen2VLImageProcessor"}, QWEN2_VL),
        ({"image_processor_type": "Qwen2VLImageProcessorFast"}, QWEN3_VL),
        ({"video_processor_type": QWEN2_VL, "image_processor_type": "Other"}, QWEN2_VL),
    ],
)
def test_the_class_is_named_or_follows_from_the_image_processor_as_in_transformers(tmp_path, keys, name):
    write_json(tmp_path / "preprocessor_config.json", keys)
    video = video_of(tmp_path, QWEN3_TOWER if name == QWEN3_VL else QWEN2_TOWER)
    assert (video.processor, video.max_pixels) == (CLASSES[name].processor, CLASSES[name].longest_edge)


def test_limits_of_an_older_file_take_precedence_in_the_class_that_reads_them(tmp_path):
    limits = {"min_pixels": 3136, "max_pixels": 12845056}
    write_json(tmp_path / "preprocessor_config.json", {**limits, "video_processor_type": QWEN2_VL})
    video = video_of(tmp_path, QWEN2_TOWER)
    assert (video.min_pixels, video.max_pixels) == (3136, 12845056)
    write_json(tmp_path / "preprocessor_config.json", {**limits, "video_processor_type": QWEN3_VL})
    assert video_of(tmp_path).max_pixels == CLASSES[QWEN3_VL].longest_edge


def test_the_limit_per_frame_is_read_if_it_is_on(tmp_path):
    path = tmp_path / "video_preprocessor_config.json"
    write_json(path, {"max_video_tokens": 50})
    assert video_of(tmp_path).max_video_tokens == 0
    write_json(path, {"cap_pixels_per_frame": True})
    assert video_of(tmp_path).max_video_tokens == 768
    write_json(path, {"cap_pixels_per_frame": True, "max_video_tokens": 50})
    assert video_of(tmp_path).max_video_tokens == 50


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"video_processor_type": "Other"}, "video_processor_type 'Other': supported: Qwen2VL"),
        ({"patch_size": 14}, "patch_size 14: supported: 16"),
        ({"temporal_patch_size": 1}, "temporal_patch_size 1: supported: 2"),
        ({"merge_size": 3}, "merge_size 3: supported: 2"),
        ({"do_resize": False}, "do_resize False: supported: True"),
        ({"resample": 2}, "resample 2: supported: 3"),
        ({"size": {"shortest_edge": 5}}, "key 'longest_edge' is missing"),
        ({"size": {"shortest_edge": 5, "longest_edge": 4}}, "largest area 4 is less than the smallest, 5 "),
        ({"image_mean": 0.5}, "image_mean 0.5: expected a list of numbers"),
        ({"max_frames": 0}, "max_frames 0: expected at least 1"),
    ],
)
def test_a_setting_that_is_not_supported_names_file_key_and_value(tmp_path, keys, message):
    path = tmp_path / "video_preprocessor_config.json"
    write_json(path, keys)
    with pytest.raises(ValueError, match=message) as error:
        video_of(tmp_path)
    assert str(error.value).startswith(str(path))


@pytest.mark.parametrize(
    ("family", "processor", "timestamps", "rate"),
    [("qwen3_vl", "qwen3_vl", "text", 0.0), ("qwen2_5_vl", "qwen2_vl", "positions", 4.0)],
)
def test_families_tell_times_in_their_own_way(tmp_path, family, processor, timestamps, rate):
    checkpoint = write_video_checkpoint(tmp_path, family)
    vision = read_model(checkpoint).vision
    video = vision.video
    assert (video.processor, video.timestamps, video.tokens_per_second) == (processor, timestamps, rate)
    assert video.token_id == json.loads((checkpoint / "config.json").read_text())["video_token_id"]
    assert video.min_pixels == AREA * (4 if family == "qwen3_vl" else 1)
    assert vision.patch_dim == 2 * 3 * 8 * 8


def test_the_rate_of_positions_is_that_of_the_checkpoint(tmp_path):
    checkpoint = write_video_checkpoint(tmp_path, "qwen2_5_vl")
    config = json.loads((checkpoint / "config.json").read_text())
    config["vision_config"]["tokens_per_second"] = 2
    write_json(checkpoint / "config.json", config)
    assert read_model(checkpoint).vision.video.tokens_per_second == 2.0


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_without_a_token_for_videos_the_tower_takes_images_only(tmp_path, family):
    checkpoint = write_video_checkpoint(tmp_path, family)
    config = json.loads((checkpoint / "config.json").read_text())
    del config["video_token_id"]
    write_json(checkpoint / "config.json", config)
    vision = read_model(checkpoint).vision
    assert vision.video is None
    assert vision.patch_dim == 3 * 8 * 8


def test_frames_of_an_omni_thinker_have_its_processors_limits_not_the_checkpoints(tmp_path):
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint", action_expert=False, videos=True)
    path = checkpoint / "preprocessor_config.json"
    processor = json.loads(path.read_text())
    write_json(path, processor | {"min_pixels": 1, "max_pixels": 2, "image_mean": [0.1, 0.2, 0.3]})
    video = read_model(checkpoint).vision.video
    assert (video.min_pixels, video.max_pixels) == (128 * 32 * 32, 768 * 32 * 32)
    assert (video.processor, video.image_mean) == ("qwen2_vl", (0.1, 0.2, 0.3))


@pytest.mark.parametrize(("key", "rate"), [(None, 25), (13, 13)])
@pytest.mark.parametrize("section", [[], ["thinker_config"]], ids=["thinker", "whole"])
def test_positions_of_an_omni_thinker_are_exact_seconds(tmp_path, section, key, rate):
    write = write_whole_omni_checkpoint if section else write_tiny_checkpoint
    checkpoint = write(tmp_path / "checkpoint", videos=True)
    change(checkpoint / "config.json", [*section, "position_id_per_seconds"], key)
    video = read_model(checkpoint).vision.video
    assert (video.timestamps, video.tokens_per_second) == ("exact_positions", rate)


def test_an_omni_thinker_whose_template_writes_no_videos_takes_images_only(tmp_path):
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint", action_expert=False, videos=True)
    path = checkpoint / "chat_template.jinja"
    path.write_text(path.read_text().replace("<|video_pad|>", ""))
    assert read_model(checkpoint).vision.video is None
