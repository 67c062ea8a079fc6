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
from edgellm_ros.builder.decoder import DecoderArchitecture, build_decoder
from edgellm_ros.builder.decoder_cuda import build_cuda_decoder
from edgellm_ros.builder.families import Family
from edgellm_ros.builder.families.internvl.config import MODEL_TYPE, vision_architecture
from edgellm_ros.builder.families.internvl.vision import build_vision
from edgellm_ros.builder.image_processing import IMAGE_PROCESSOR
from edgellm_ros.builder.lm_head import find_lm_head
from edgellm_ros.builder.model import Model
from edgellm_ros.builder.rope import read_position_limit, read_rope
from edgellm_ros.builder.vocabulary import (
    added_token_id,
    read_generation_config,
    special_tokens,
    stop_token_ids,
)
from edgellm_ros.engine_directory.config import LanguageModelConfig


def read(checkpoint: Path, config: ConfigSection, weights: Weights) -> Model:
    """Read a checkpoint; see `Family`.

    transformers before 4.56 wrote the tensors under other names, which published checkpoints have.
    """
    generation, section = read_generation_config(checkpoint), config.section("text_config")
    older = weights.has_module("vision_tower")
    processor = read_processor(checkpoint, IMAGE_PROCESSOR)
    vision = vision_architecture(config, processor, "" if older else "model.")
    text = text_architecture(section, "language_model.model" if older else "model.language_model")
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


def text_architecture(text: ConfigSection, prefix: str) -> DecoderArchitecture:
    """Read `text_config`, which is that of Qwen2.5 or Qwen3."""
    qwen2 = text.one_of("model_type", ["qwen2", "qwen3"]) == "qwen2"
    text.one_of("hidden_act", ["silu"], default="silu")
    heads = text.size("num_attention_heads")
    head_dim = text.size("head_dim", text.size("hidden_size") // heads if qwen2 else 128)
    runner = text.make(
        LanguageModelConfig,
        hidden_size=text.size("hidden_size"),
        num_hidden_layers=text.size("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=text.size("num_key_value_heads", heads),
        head_dim=head_dim,
        vocab_size=text.size("vocab_size"),
        max_position_embeddings=read_position_limit(text)[0],
        reduced_vocab_size=0,
        num_deepstack_features=0,
        rope=read_rope(text, head_dim),
    )
    bias = not qwen2 and text.flag("attention_bias", False)
    return DecoderArchitecture(
        runner=runner,
        intermediate_size=text.size("intermediate_size"),
        epsilon=text.number("rms_norm_eps", 1e-6),
        prefix=prefix,
        qkv_bias=qwen2 or bias,
        output_bias=bias,
        head_norms=not qwen2,
    )


FAMILY = Family("internvl", (MODEL_TYPE,), read)
