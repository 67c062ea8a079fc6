# SPDX-License-Identifier: Apache-2.0
"""Reads the backbone of GR00T N1.7: the first layers of a Qwen3-VL.

Source of the model: LeRobot 0.6.1, policies/groot/groot_n1_7.py.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection, read_processor, read_section
from edgellm_ros.builder.config.image_processing import IMAGE_PROCESSOR
from edgellm_ros.builder.families.qwen3_vl import DEFAULTS, MERGERS
from edgellm_ros.builder.families.qwen3_vl.config import read_decoder, vision_architecture
from edgellm_ros.builder.families.qwen3_vl.vision import build_vision
from edgellm_ros.builder.policies.groot.architecture import Backbone
from edgellm_ros.builder.policies.groot.kept_layers import keep_layers
from edgellm_ros.builder.weights.claimed_sizes import check_layers, check_no_more_layers
from edgellm_ros.builder.weights.weights import Weights

BACKBONES = "backbone.model.model", "backbone.model"  # of the tensors, by version of transformers
LM_HEAD = "backbone.model.lm_head.weight"


def read_qwen(config: ConfigSection, vlm: Path, weights: Weights) -> Backbone:
    """Read sizes; config: GR00T's; vlm: the folder of its Qwen3-VL.

    ValueError, which names file, key and value, for a model that the graphs would compute differently.
    """
    config.one_of("reproject_vision", [False], default=False)
    section, backbone = read_section(vlm / "config.json"), _find_backbone(weights)
    section.one_of("model_type", ["qwen3_vl"])
    tower, text = section.section("vision_config"), section.section("text_config")
    text = keep_layers(config, text, weights, f"{backbone}.language_model")
    check_layers(tower, "depth", weights, f"{backbone}.visual.blocks")
    processor = read_processor(vlm, IMAGE_PROCESSOR)
    vision = vision_architecture(tower, processor, f"{backbone}.visual", MERGERS)
    levels = vision.config.num_deepstack_features
    mergers = f"{backbone}.visual.{MERGERS.deepstack}"
    check_no_more_layers(tower, "deepstack_visual_indexes", levels, weights, mergers)
    if (
        text.size("num_hidden_layers") <= levels
    ):  # the reference takes the last layer's result before it adds a feature of the tower
        raise config.fail("select_layer", f"expected more layers than the {levels} deepstack features")
    decoder = read_decoder(text, f"{backbone}.language_model", levels, DEFAULTS)
    tower_modules = (f"{vision.prefix}.blocks", f"{vision.prefix}.merger", *([mergers] if levels else []))
    return Backbone(
        section.where, decoder, False, vision.config, partial(build_vision, vision), tower_modules
    )


def _find_backbone(weights: Weights) -> str:
    """Find what the names of the backbone's tensors begin with."""
    found = (each for each in BACKBONES if weights.has_module(f"{each}.language_model"))
    return next(found, BACKBONES[0])
