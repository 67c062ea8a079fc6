# SPDX-License-Identifier: Apache-2.0
"""Qwen3-VL, dense: also Cosmos-Reason2 and other models that are trained from it."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection, read_processor
from edgellm_ros.builder.config.image_processing import IMAGE_PROCESSOR
from edgellm_ros.builder.config.video_processing import QWEN3_VL, read_video
from edgellm_ros.builder.families import Family
from edgellm_ros.builder.families.model import Model, make_model
from edgellm_ros.builder.families.qwen3_vl.config import TextDefaults, read_decoder, vision_architecture
from edgellm_ros.builder.families.qwen3_vl.fused_vision import describe_vision
from edgellm_ros.builder.families.qwen3_vl.vision import MergerNames, build_vision
from edgellm_ros.builder.weights.claimed_sizes import check_decoder_sizes, check_layers
from edgellm_ros.builder.weights.weights import Weights

MODEL_TYPE = "qwen3_vl"
DEFAULTS = TextDefaults(rope_theta=5e5, num_key_value_heads=32, head_dim=128)
MERGERS = MergerNames("deepstack_merger_list", "norm", "linear_fc1", "linear_fc2")


def read(checkpoint: Path, config: ConfigSection, weights: Weights) -> Model:
    """Read a checkpoint; see `Family`."""
    section, tower = config.section("text_config"), config.section("vision_config")
    check_layers(tower, "depth", weights, "model.visual.blocks")
    check_decoder_sizes(section, weights, "model.language_model")
    video = read_video(checkpoint, config, tower, QWEN3_VL)
    processor = read_processor(checkpoint, IMAGE_PROCESSOR)
    vision = vision_architecture(tower, processor, "model.visual", MERGERS, video)
    text = read_decoder(section, "model.language_model", vision.config.num_deepstack_features, DEFAULTS)
    return dataclasses.replace(
        make_model(checkpoint, config, weights, text, section),
        vision=vision.config,
        encoders={"visual": partial(build_vision, vision, weights)},
        describe_vision=partial(describe_vision, vision),
    )


FAMILY = Family("qwen3_vl", (MODEL_TYPE,), read)
