# SPDX-License-Identifier: Apache-2.0
"""Qwen3-ASR: speech to text, with Qwen3-Omni's audio encoder.

The text model is Qwen3's. A checkpoint has the original layout (`thinker_config`, tensors `thinker.*`) or the
layout of transformers (`audio_config`, tensors `model.*`). Positions have one axis in both: the three axes of
the original's `mrope_section` are always equal.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection, read_processor
from edgellm_ros.builder.config.prompt_files import TOKENIZER_FILE, read_tokenizer
from edgellm_ros.builder.config.vocabulary import read_generation_config, stop_token_ids
from edgellm_ros.builder.families import Family
from edgellm_ros.builder.families.model import Model, make_model
from edgellm_ros.builder.families.qwen3 import read_decoder
from edgellm_ros.builder.families.qwen3_asr.config import (
    ALIASES,
    TRANSFORMERS,
    check_text,
    encoder_architecture,
    find_layout,
    refuse_aligner,
)
from edgellm_ros.builder.families.qwen3_omni.audio import build_audio
from edgellm_ros.builder.weights.claimed_sizes import check_decoder_sizes, check_layers
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine_directory.tokenizer_file import TRANSCRIPT_MARK


def read(checkpoint: Path, config: ConfigSection, weights: Weights) -> Model:
    """Read a checkpoint; see `Family`."""
    layout, section = find_layout(config)
    refuse_aligner(section, weights)
    text, encoder = section.section("text_config"), section.section("audio_config")
    if layout is TRANSFORMERS:
        encoder = encoder.canonical(ALIASES)
    check_decoder_sizes(text, weights, layout.text)
    check_text(text, weights, layout.text)
    check_layers(encoder, "encoder_layers", weights, f"{layout.tower}.layers")
    audio = encoder_architecture(encoder, read_processor(checkpoint, "feature_extractor"), layout)
    generation = read_generation_config(checkpoint)
    ends = next((each for each in (generation, config, section) if each.has("eos_token_id")), generation)
    stops = stop_token_ids(text, ends)
    decoder = read_decoder(text, layout.text)
    model = make_model(
        checkpoint, section, weights, decoder, text, tied=True, head=layout.lm_head, stops=stops
    )
    mark = _transcript_token_id(checkpoint / TOKENIZER_FILE)
    return dataclasses.replace(
        model,
        audio=audio.config,
        encoders={"audio": partial(build_audio, audio, weights)},
        special_tokens=dataclasses.replace(model.special_tokens, transcript_token_id=mark),
    )


def _transcript_token_id(path: Path) -> int:
    """Return the id of the mark before a transcript.

    ValueError unless the tokenizer has it as an added token that texts show.
    """
    tokens = read_tokenizer(path).get_added_tokens_decoder()
    mark = next((each for each, token in tokens.items() if token.content == TRANSCRIPT_MARK), None)
    if mark is None or tokens[mark].special:
        found = "missing" if mark is None else "special, so answers would leave it out"
        raise ValueError(f"{path}: the added token {TRANSCRIPT_MARK!r} is {found}")
    return mark


FAMILY = Family("qwen3_asr", ("qwen3_asr",), read)
