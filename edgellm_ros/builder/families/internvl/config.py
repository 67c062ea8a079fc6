# SPDX-License-Identifier: Apache-2.0
"""Reads and checks the vision part of an InternVL checkpoint's `config.json`.

The checks cover everything that the graph relies on. Source: transformers, configuration_internvl.py.
"""

from __future__ import annotations

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.config.image_processing import tiled_images
from edgellm_ros.builder.families.internvl.vision import VisionArchitecture
from edgellm_ros.multimodal.vision_config import InternVLVisionConfig

MODEL_TYPE = "internvl"


def vision_architecture(config: ConfigSection, processor: ConfigSection, prefix: str) -> VisionArchitecture:
    """Read `vision_config`, the projector's keys, and their image processor.

    prefix: of the vision tower's tensors. ValueError for anything that the graph would compute differently.
    """
    vision = config.section("vision_config")
    vision.one_of("hidden_act", ["gelu"], default="gelu")
    config.one_of("projector_hidden_act", ["gelu"], default="gelu")
    config.one_of("vision_feature_layer", [-1], default=-1)
    config.one_of("vision_feature_select_strategy", ["default"], default="default")
    tile, patch = _side(vision, "image_size", 448), _side(vision, "patch_size", 14)
    ratio = config.number("downsample_ratio", 0.5)
    merge = round(1 / ratio) if ratio > 0 else 0
    if merge < 1 or merge * ratio != 1:
        raise config.fail("downsample_ratio", "expected 1 / n, such as 0.5")
    if tile % (patch * merge):
        raise vision.fail("image_size", f"expected a multiple of {patch * merge}, a token's side in pixels")
    built = vision.make(
        InternVLVisionConfig,
        hidden_size=vision.size("hidden_size", 1024),
        num_heads=vision.size("num_attention_heads", 16),
        depth=vision.size("num_hidden_layers", 24),
        out_hidden_size=config.section("text_config").size("hidden_size"),
        in_channels=vision.size("num_channels", 3),
        patch_size=patch,
        spatial_merge_size=merge,
        tile_size=tile,
        **tiled_images(processor, tile),
    )
    config.one_of("image_seq_length", [built.tile_tokens], default=256)
    return VisionArchitecture(
        built,
        prefix,
        intermediate_size=vision.size("intermediate_size", 4096),
        epsilon=vision.number("layer_norm_eps", 1e-6),
        rms_norms=vision.one_of("norm_type", ["layer_norm", "rms_norm"], default="layer_norm") == "rms_norm",
        last_norm=not vision.flag("use_mean_pooling", True),
        positions=vision.flag("use_absolute_position_embeddings", True),
        qkv_bias=vision.flag("attention_bias", False),
        qk_norms=vision.flag("use_qk_norm", False),
    )


def _side(vision: ConfigSection, key: str, default: int) -> int:
    """Read the side of a square, a number or a list of two equal ones."""
    if not isinstance(vision.data.get(key), list):
        return vision.size(key, default)
    sides = vision.integers(key)
    if len(sides) != 2 or sides[0] != sides[1] or sides[0] < 1:
        raise vision.fail(key, "expected a square")
    return sides[0]
