# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-Omni: the thinker, with vision tower and audio encoder.

A checkpoint is the published whole, of which the thinker is read: it answers in text, and the talker speaks;
or the thinker alone, as transformers saves it. The language model is Qwen2.5's, the vision tower Qwen2.5-VL's
with queries, keys and values in layers of their own.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection, read_processor
from edgellm_ros.builder.config.image_processing import IMAGE_PROCESSOR
from edgellm_ros.builder.config.vocabulary import read_generation_config, stop_token_ids
from edgellm_ros.builder.families import Family, qwen2
from edgellm_ros.builder.families.model import Model, make_model
from edgellm_ros.builder.families.qwen2_5_omni.audio import build_audio
from edgellm_ros.builder.families.qwen2_5_omni.config import (
    BOUNDARIES,
    TOKENS,
    VISION_SIZES,
    audio_architecture,
    check_text,
    thinker_video,
)
from edgellm_ros.builder.families.qwen2_5_vl import text_rope, vision_architecture
from edgellm_ros.builder.families.qwen2_5_vl.vision import build_vision
from edgellm_ros.builder.graph.lm_head import LM_HEAD_TENSOR
from edgellm_ros.builder.weights.claimed_sizes import check_decoder_sizes, check_layers
from edgellm_ros.builder.weights.weights import Weights

WHOLE, THINKER = "qwen2_5_omni", "qwen2_5_omni_thinker"


def read(checkpoint: Path, config: ConfigSection, weights: Weights) -> Model:
    """Read a checkpoint; see `Family`."""
    is_whole = config.data["model_type"] == WHOLE
    thinker = (config.section("thinker_config") if is_whole else config).canonical(TOKENS)
    prefix = "thinker." if is_whole or weights.has_module("thinker") else ""
    visual, listener, decoder = (f"{prefix}{module}" for module in ("visual", "audio_tower", "model"))
    thinker.require([*TOKENS, *BOUNDARIES])
    text, tower, encoder = (thinker.section(f"{part}_config") for part in ("text", "vision", "audio"))
    check_decoder_sizes(text, weights, decoder)
    check_text(text)
    tower.require(VISION_SIZES)
    check_layers(tower, "depth", weights, f"{visual}.blocks")
    check_layers(encoder, "encoder_layers", weights, f"{listener}.layers")
    video = thinker_video(checkpoint, thinker, tower)
    images, sounds = (read_processor(checkpoint, part) for part in (IMAGE_PROCESSOR, "feature_extractor"))
    vision = vision_architecture(tower, images, visual, video)
    vision = dataclasses.replace(vision, qkv=("q", "k", "v"))
    audio = audio_architecture(encoder, sounds, listener)
    generation = read_generation_config(checkpoint)
    ends = next((each for each in (generation, text, thinker) if each.has("eos_token_id")), generation)
    return dataclasses.replace(
        make_model(
            checkpoint,
            thinker,
            weights,
            qwen2.read_decoder(text, decoder, text_rope(text)),
            text,
            head=f"{prefix}{LM_HEAD_TENSOR}",
            stops=stop_token_ids(text, ends),
        ),
        vision=vision.config,
        audio=audio.config,
        encoders={
            "visual": partial(build_vision, vision, weights),
            "audio": partial(build_audio, audio, weights),
        },
    )


FAMILY = Family("qwen2_5_omni", (WHOLE, THINKER), read)
