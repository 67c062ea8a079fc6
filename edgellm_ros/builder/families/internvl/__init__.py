# SPDX-License-Identifier: Apache-2.0
"""InternVL3 and InternVL3.5 in the format of transformers (`internvl`).

A model has two parts: InternViT, and Qwen2.5 or Qwen3. InternVL's authors publish each checkpoint in this
format and in one of their own (`internvl_chat`), which is not supported.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection, read_processor
from edgellm_ros.builder.config.image_processing import IMAGE_PROCESSOR
from edgellm_ros.builder.config.prompt_files import added_token_id
from edgellm_ros.builder.families import Family, qwen2, qwen3
from edgellm_ros.builder.families.internvl.config import MODEL_TYPE, vision_architecture
from edgellm_ros.builder.families.internvl.fused_vision import describe_vision
from edgellm_ros.builder.families.internvl.vision import build_vision
from edgellm_ros.builder.families.model import Model, make_model
from edgellm_ros.builder.weights.claimed_sizes import check_decoder_sizes, check_layers
from edgellm_ros.builder.weights.weights import Weights

TEXT_MODELS = {"qwen2": qwen2.read_decoder, "qwen3": qwen3.read_decoder}


def read(checkpoint: Path, config: ConfigSection, weights: Weights) -> Model:
    """Read a checkpoint; see `Family`.

    transformers before 4.56 wrote the tensors under other names, which published checkpoints have.
    """
    section, older = config.section("text_config"), weights.has_module("vision_tower")
    processor, prefix = read_processor(checkpoint, IMAGE_PROCESSOR), "" if older else "model."
    layers = f"{prefix}vision_tower.encoder.layer"
    check_layers(config.section("vision_config"), "num_hidden_layers", weights, layers, default=24)
    vision = vision_architecture(config, processor, prefix)
    read_decoder = TEXT_MODELS[section.one_of("model_type", list(TEXT_MODELS))]
    decoder = "language_model.model" if older else "model.language_model"
    check_decoder_sizes(section, weights, decoder)
    text = read_decoder(section, decoder)
    tied = config.flag("tie_word_embeddings", section.flag("tie_word_embeddings", True))
    head = "language_model.lm_head.weight" if older else "lm_head.weight"
    model = make_model(checkpoint, config, weights, text, section, tied=tied, head=head)
    tokens = dataclasses.replace(
        model.special_tokens,
        vision_start_token_id=added_token_id(checkpoint, "start_image_token", section),
        vision_end_token_id=added_token_id(checkpoint, "end_image_token", section),
    )
    return dataclasses.replace(
        model,
        special_tokens=tokens,
        vision=vision.config,
        encoders={"visual": partial(build_vision, vision, weights)},
        cuda_encoders={"visual": partial(build_vision, vision, weights, cuda=True)},
        describe_vision=partial(describe_vision, vision),
    )


FAMILY = Family("internvl", (MODEL_TYPE,), read)
