# SPDX-License-Identifier: Apache-2.0
"""InternVL3 and InternVL3.5 in the format of transformers (`internvl`): InternViT, and Qwen2.5 or Qwen3.

InternVL's authors publish each checkpoint in this format and in one of their own (`internvl_chat`), which is
not supported.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

from edgellm_ros.builder.checkpoint import Weights
from edgellm_ros.builder.checkpoint_config import ConfigSection, read_processor
from edgellm_ros.builder.decoder import build_decoder
from edgellm_ros.builder.decoder_cuda import build_cuda_decoder
from edgellm_ros.builder.families import Family, qwen2, qwen3
from edgellm_ros.builder.families.internvl.config import MODEL_TYPE, vision_architecture
from edgellm_ros.builder.families.internvl.vision import build_vision
from edgellm_ros.builder.image_processing import IMAGE_PROCESSOR
from edgellm_ros.builder.lm_head import find_lm_head
from edgellm_ros.builder.model import Model
from edgellm_ros.builder.rope import read_position_limit
from edgellm_ros.builder.vocabulary import (
    added_token_id,
    read_generation_config,
    special_tokens,
    stop_token_ids,
)

TEXT_MODELS = {"qwen2": qwen2.read_decoder, "qwen3": qwen3.read_decoder}


def read(checkpoint: Path, config: ConfigSection, weights: Weights) -> Model:
    """Read a checkpoint; see `Family`.

    transformers before 4.56 wrote the tensors under other names, which published checkpoints have.
    """
    generation, section = read_generation_config(checkpoint), config.section("text_config")
    older = weights.has_module("vision_tower")
    processor = read_processor(checkpoint, IMAGE_PROCESSOR)
    vision = vision_architecture(config, processor, "" if older else "model.")
    read_decoder = TEXT_MODELS[section.one_of("model_type", list(TEXT_MODELS))]
    text = read_decoder(section, "language_model.model" if older else "model.language_model")
    tied = config.flag("tie_word_embeddings", section.flag("tie_word_embeddings", True))
    head = "language_model.lm_head.weight" if older else "lm_head.weight"
    tokens = dataclasses.replace(
        special_tokens(config, section, generation),
        vision_start_token_id=added_token_id(checkpoint, "start_image_token", section),
        vision_end_token_id=added_token_id(checkpoint, "end_image_token", section),
    )
    return Model(
        llm=text.runner,
        embedding=text.embedding,
        lm_head=find_lm_head(weights, text.embedding, tied, head),
        special_tokens=tokens,
        stop_token_ids=stop_token_ids(section, generation),
        position_limit=read_position_limit(section)[1],
        build_llm=partial(build_decoder, text, weights),
        build_cuda_llm=partial(build_cuda_decoder, text, weights),
        vision=vision.config,
        encoders={"visual": partial(build_vision, vision, weights)},
    )


FAMILY = Family("internvl", (MODEL_TYPE,), read)
