# SPDX-License-Identifier: Apache-2.0
"""Qwen2 and Qwen2.5, text only.

Both have biases of queries, keys and values, and sliding windows.
"""

from __future__ import annotations

from pathlib import Path

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.config.rope import read_rope
from edgellm_ros.builder.config.text_model import (
    read_head_dim,
    read_language_model,
    read_norm,
    read_sliding_windows,
)
from edgellm_ros.builder.families import Family
from edgellm_ros.builder.families.model import Model, make_model
from edgellm_ros.builder.model.decoder import Decoder, SwiGLU, attention_layers
from edgellm_ros.builder.weights.claimed_sizes import check_decoder_sizes
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine_directory.rope_config import RopeConfig


def read_decoder(text: ConfigSection, prefix: str = "model", rope: RopeConfig | None = None) -> Decoder:
    """Read the decoder's section; `rope` replaces its RoPE, for models with mRoPE."""
    head_dim = read_head_dim(text)
    llm = read_language_model(text, head_dim, rope or read_rope(text, head_dim), default_kv_heads=32)
    feed_forward = SwiGLU(text.size("intermediate_size"))
    layers = attention_layers(read_sliding_windows(text), feed_forward, qkv_bias=True)
    return Decoder(config=llm, layers=layers, norm=read_norm(text), prefix=prefix)


def read(checkpoint: Path, config: ConfigSection, weights: Weights) -> Model:
    """Read a checkpoint; see `Family`."""
    check_decoder_sizes(config, weights, "model")
    return make_model(checkpoint, config, weights, read_decoder(config))


FAMILY = Family("qwen2", ("qwen2",), read)
