# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Omni: the dense thinker, with optional vision tower and audio encoder.

A checkpoint is the thinker alone, or the published whole, of which the thinker is read: it answers in text,
and the talker speaks. Vision tower and language model are Qwen3-VL's.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection, read_processor
from edgellm_ros.builder.config.image_processing import IMAGE_PROCESSOR
from edgellm_ros.builder.config.vocabulary import read_generation_config, stop_token_ids
from edgellm_ros.builder.families import Family
from edgellm_ros.builder.families.model import Model, make_model
from edgellm_ros.builder.families.qwen3_omni.audio import build_audio
from edgellm_ros.builder.families.qwen3_omni.config import audio_architecture, check_dense
from edgellm_ros.builder.families.qwen3_omni.processor import thinker_video
from edgellm_ros.builder.families.qwen3_vl.config import TextDefaults, read_decoder, vision_architecture
from edgellm_ros.builder.families.qwen3_vl.fused_vision import describe_vision
from edgellm_ros.builder.families.qwen3_vl.vision import MergerNames, build_vision
from edgellm_ros.builder.graph.lm_head import LM_HEAD_TENSOR
from edgellm_ros.builder.weights.claimed_sizes import check_decoder_sizes, check_layers
from edgellm_ros.builder.weights.weights import Weights

THINKER, WHOLE = "qwen3_omni_moe_thinker", "qwen3_omni_moe"
DEFAULTS = TextDefaults(rope_theta=1e6, num_key_value_heads=4, head_dim=None)
MERGERS = MergerNames("merger_list", "ln_q", "mlp.0", "mlp.2")


def read(checkpoint: Path, config: ConfigSection, weights: Weights) -> Model:
    """Read a checkpoint; see `Family`."""
    prefix, thinker = "", config
    if config.data["model_type"] == WHOLE:
        prefix, thinker = "thinker.", config.section("thinker_config")
    section = thinker.section("text_config")
    check_decoder_sizes(section, weights, f"{prefix}model")
    check_dense(section)
    encoders, vision, audio = {}, None, None
    if weights.has_module(f"{prefix}visual"):
        tower, processor = thinker.section("vision_config"), read_processor(checkpoint, IMAGE_PROCESSOR)
        check_layers(tower, "depth", weights, f"{prefix}visual.blocks")
        video = thinker_video(checkpoint, thinker, tower)
        vision = vision_architecture(tower, processor, f"{prefix}visual", MERGERS, video)
        encoders["visual"] = partial(build_vision, vision, weights)
    if weights.has_module(f"{prefix}audio_tower"):
        encoder, extractor = thinker.section("audio_config"), read_processor(checkpoint, "feature_extractor")
        listener = f"{prefix}audio_tower"
        check_layers(encoder, "encoder_layers", weights, f"{listener}.layers")
        audio = audio_architecture(encoder, extractor, listener, (listener, "proj1", "proj2"))
        encoders["audio"] = partial(build_audio, audio, weights)
    levels = vision.config.num_deepstack_features if vision else 0
    text = read_decoder(section, f"{prefix}model", levels, DEFAULTS)
    stops = _stop_token_ids(config, section, read_generation_config(checkpoint))
    head = f"{prefix}{LM_HEAD_TENSOR}"
    return dataclasses.replace(
        make_model(checkpoint, thinker, weights, text, section, head=head, stops=stops),
        vision=vision.config if vision else None,
        audio=audio.config if audio else None,
        encoders=encoders,
        describe_vision=partial(describe_vision, vision) if vision else None,
    )


def _stop_token_ids(
    config: ConfigSection, section: ConfigSection, generation: ConfigSection
) -> tuple[int, ...]:
    """Read the ids that end an answer.

    The whole model's code ends an answer at `im_end_token_id`.
    """
    given = generation.has("eos_token_id") or section.has("eos_token_id")
    if not given and config.has("im_end_token_id"):
        ids = {"eos_token_id": config.integer("im_end_token_id")}
        return stop_token_ids(section, ConfigSection(ids, config.where))
    return stop_token_ids(section, generation)


FAMILY = Family("qwen3_omni", (THINKER, WHOLE), read)
