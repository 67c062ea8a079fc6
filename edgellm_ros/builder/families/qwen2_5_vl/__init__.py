# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-VL: also Cosmos-Reason1 and other models that are trained from it."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection, read_processor
from edgellm_ros.builder.config.image_processing import IMAGE_PROCESSOR, resized_images
from edgellm_ros.builder.config.rope import read_rope, rope_section
from edgellm_ros.builder.config.text_model import read_head_dim
from edgellm_ros.builder.config.video_processing import QWEN2_VL, read_video
from edgellm_ros.builder.families import Family, qwen2
from edgellm_ros.builder.families.model import Model, make_model
from edgellm_ros.builder.families.qwen2_5_vl.vision import VisionArchitecture, build_vision
from edgellm_ros.builder.families.qwen3_vl.config import axial_theta
from edgellm_ros.builder.weights.claimed_sizes import check_decoder_sizes, check_layers
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine_directory.rope_config import RopeConfig
from edgellm_ros.multimodal.video_config import VideoConfig
from edgellm_ros.multimodal.vision_config import Qwen2_5VisionConfig


def read(checkpoint: Path, config: ConfigSection, weights: Weights) -> Model:
    """Read a checkpoint; see `Family`.

    Checkpoints from before transformers 4.52 have the language model's keys beside `vision_config`, and other
    names of tensors.
    """
    older = weights.has_module("visual")
    section = config.section("text_config") if config.has("text_config") else config
    processor, tower = read_processor(checkpoint, IMAGE_PROCESSOR), config.section("vision_config")
    prefix, decoder = ("visual", "model") if older else ("model.visual", "model.language_model")
    check_layers(tower, "depth", weights, f"{prefix}.blocks", default=32)
    check_decoder_sizes(section, weights, decoder)
    video = read_video(checkpoint, config, tower, QWEN2_VL, tower.number("tokens_per_second", 4.0))
    vision = vision_architecture(tower, processor, prefix, video)
    for required in ("rms_norm_eps", "num_key_value_heads"):  # the defaults are not those of Qwen2
        section.number(required)
    rope = text_rope(section)
    text = qwen2.read_decoder(section, decoder, rope)
    return dataclasses.replace(
        make_model(checkpoint, config, weights, text, section),
        vision=vision.config,
        encoders={"visual": partial(build_vision, vision, weights)},
    )


def text_rope(text: ConfigSection) -> RopeConfig:
    """Read RoPE with blocks of frequencies for time, height and width."""
    plain, rope = read_rope(text, read_head_dim(text), default_theta=1e6), rope_section(text)
    section = rope.integers("mrope_section") if rope.has("mrope_section") else (16, 24, 24)
    return rope.make(partial(dataclasses.replace, plain), mrope_section=section, mrope_interleaved=False)


def vision_architecture(
    vision: ConfigSection, processor: ConfigSection, prefix: str, video: VideoConfig | None = None
) -> VisionArchitecture:
    """Read the section of the vision tower, and its image processor."""
    vision.one_of("hidden_act", ["silu"], default="silu")
    patch, frames, merge = (
        vision.size(f"{name}_size", default)
        for name, default in (("patch", 14), ("temporal_patch", 2), ("spatial_merge", 2))
    )
    key = "fullatt_block_indexes"
    full, depth = vision.integers(key) if vision.has(key) else (7, 15, 23, 31), vision.size("depth", 32)
    if any(not 0 <= block < depth for block in full):
        raise vision.fail(key, f"expected blocks from 0 to {depth - 1}")
    built = vision.make(
        Qwen2_5VisionConfig,
        hidden_size=vision.size("hidden_size"),
        num_heads=vision.size("num_heads", 16),
        depth=depth,
        out_hidden_size=vision.size("out_hidden_size", 3584),
        in_channels=vision.size("in_channels", 3),
        patch_size=patch,
        temporal_patch_size=frames,
        spatial_merge_size=merge,
        window_size=vision.size("window_size", 112),
        full_attention_blocks=full,
        rope_theta=axial_theta(vision),
        video=video,
        **resized_images(processor, patch, frames, merge),
    )
    return VisionArchitecture(built, prefix, vision.size("intermediate_size", 3420))


FAMILY = Family("qwen2_5_vl", ("qwen2_5_vl",), read)
