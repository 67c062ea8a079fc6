# SPDX-License-Identifier: Apache-2.0
"""Qwen3, dense and text only.

Attention has norms of each head's queries and keys, and sliding windows.
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


def read_decoder(
    text: ConfigSection,
    prefix: str = "model",
    rope: RopeConfig | None = None,
    num_deepstack_features: int = 0,
) -> Decoder:
    """Read the decoder's section; `rope` replaces its RoPE, for models with mRoPE."""
    head_dim, bias = read_head_dim(text, default=128), text.flag("attention_bias", False)
    rope = rope or read_rope(text, head_dim)
    llm = read_language_model(text, head_dim, rope, 32, num_deepstack_features)
    layers = attention_layers(
        read_sliding_windows(text),
        SwiGLU(text.size("intermediate_size")),
        qkv_bias=bias,
        output_bias=bias,
        head_norms=True,
    )
    return Decoder(config=llm, layers=layers, norm=read_norm(text), prefix=prefix)


def read(checkpoint: Path, config: ConfigSection, weights: Weights) -> Model:
    """Read a checkpoint; see `Family`."""
    check_decoder_sizes(config, weights, "model")
    return make_model(checkpoint, config, weights, read_decoder(config))


FAMILY = Family("qwen3", ("qwen3",), read)
