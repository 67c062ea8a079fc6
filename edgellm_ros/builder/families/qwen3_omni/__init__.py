# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Omni: the dense thinker, with optional vision tower and audio encoder."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from edgellm_ros.builder.checkpoint import Weights
from edgellm_ros.builder.checkpoint_config import ConfigSection, read_section
from edgellm_ros.builder.decoder import build_decoder
from edgellm_ros.builder.decoder_cuda import build_cuda_decoder
from edgellm_ros.builder.families import Family
from edgellm_ros.builder.families.qwen3_omni.audio import build_audio
from edgellm_ros.builder.families.qwen3_omni.config import (
    MODEL_TYPE,
    audio_architecture,
    text_architecture,
    vision_architecture,
)
from edgellm_ros.builder.families.qwen3_omni.vision import build_vision
from edgellm_ros.builder.lm_head import find_lm_head
from edgellm_ros.builder.model import Model
from edgellm_ros.builder.rope import read_position_limit
from edgellm_ros.builder.vocabulary import read_generation_config, special_tokens, stop_token_ids


def read(checkpoint: Path, config: ConfigSection, weights: Weights) -> Model:
    """Read a thinker's checkpoint; see `Family`."""
    generation = read_generation_config(checkpoint)
    encoders, vision, audio = {}, None, None
    if weights.has_module("visual"):
        vision = vision_architecture(config, read_section(checkpoint / "preprocessor_config.json"))
        encoders["visual"] = partial(build_vision, vision, weights)
    if weights.has_module("audio_tower"):
        audio = audio_architecture(config, read_section(checkpoint / "preprocessor_config.json"))
        encoders["audio"] = partial(build_audio, audio, weights)
    text = text_architecture(config, len(vision.config.deepstack_visual_indexes) if vision else 0)
    section = config.section("text_config")
    return Model(
        llm=text.runner,
        embedding=text.embedding,
        lm_head=find_lm_head(weights, text.embedding, config.flag("tie_word_embeddings", False)),
        special_tokens=special_tokens(config, section, generation),
        stop_token_ids=stop_token_ids(section, generation),
        build_llm=partial(build_decoder, text, weights),
        build_cuda_llm=partial(build_cuda_decoder, text, weights),
        vision=vision.config if vision else None,
        audio=audio.config if audio else None,
        encoders=encoders,
        position_limit=read_position_limit(section)[1],
    )


FAMILY = Family("qwen3_omni", (MODEL_TYPE,), read)
