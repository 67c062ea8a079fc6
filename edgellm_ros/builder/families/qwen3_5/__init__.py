# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5: gated delta net, gated attention and a vision tower.

Every fourth layer has gated attention, the others have the gated delta net. A checkpoint is the published
whole or the text model alone. The tower is Qwen3-VL's without deepstack.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection, read_processor
from edgellm_ros.builder.config.image_processing import IMAGE_PROCESSOR
from edgellm_ros.builder.config.video_processing import QWEN3_VL, read_video
from edgellm_ros.builder.families import Family, qwen3_vl
from edgellm_ros.builder.families.model import Model, make_model
from edgellm_ros.builder.families.qwen3_5.config import read_decoder
from edgellm_ros.builder.families.qwen3_vl.config import vision_architecture
from edgellm_ros.builder.families.qwen3_vl.fused_vision import describe_vision
from edgellm_ros.builder.families.qwen3_vl.vision import build_vision
from edgellm_ros.builder.weights.claimed_sizes import check_decoder_sizes, check_layers
from edgellm_ros.builder.weights.weights import Weights

TEXT_MODEL, WHOLE = "qwen3_5_text", "qwen3_5"
MERGERS = dataclasses.replace(qwen3_vl.MERGERS, deepstack=None)


def read(checkpoint: Path, config: ConfigSection, weights: Weights) -> Model:
    """Read a checkpoint; see `Family`.

    A whole without `vision_config` is read as its text alone.
    """
    text, prefix, vision = config, "model", None
    if config.data["model_type"] == WHOLE:
        text, prefix = config.section("text_config"), "model.language_model"
        if config.has("vision_config"):
            tower, processor = config.section("vision_config"), read_processor(checkpoint, IMAGE_PROCESSOR)
            check_layers(tower, "depth", weights, "model.visual.blocks")
            video = read_video(checkpoint, config, tower, QWEN3_VL)
            vision = vision_architecture(tower, processor, "model.visual", MERGERS, video)
    check_decoder_sizes(text, weights, prefix)
    decoder = read_decoder(text, prefix, with_images=vision is not None)
    tied = config.flag("tie_word_embeddings", text.flag("tie_word_embeddings", False))
    return dataclasses.replace(
        make_model(checkpoint, config, weights, decoder, text, tied=tied),
        vision=vision.config if vision else None,
        encoders={"visual": partial(build_vision, vision, weights)} if vision else {},
        describe_vision=partial(describe_vision, vision) if vision else None,
    )


FAMILY = Family("qwen3_5", (TEXT_MODEL, WHOLE), read)
