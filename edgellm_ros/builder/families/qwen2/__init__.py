# SPDX-License-Identifier: Apache-2.0
"""Qwen2 and Qwen2.5, text only.

They have biases of queries, keys and values, and sliding windows.
"""

from __future__ import annotations

from pathlib import Path

from edgellm_ros.builder.checkpoint import Weights
from edgellm_ros.builder.checkpoint_config import ConfigSection
from edgellm_ros.builder.claimed_sizes import check_decoder_sizes
from edgellm_ros.builder.decoder import DecoderArchitecture
from edgellm_ros.builder.families import Family
from edgellm_ros.builder.model import Model
from edgellm_ros.builder.rope import read_rope
from edgellm_ros.builder.text_model import (
    make_text_model,
    read_head_dim,
    read_language_model,
    read_sliding_windows,
)
from edgellm_ros.engine_directory.rope_config import RopeConfig


def read_decoder(
    text: ConfigSection, prefix: str = "model", rope: RopeConfig | None = None
) -> DecoderArchitecture:
    """Read the decoder's section; `rope` replaces its RoPE, for models with mRoPE."""
    head_dim = read_head_dim(text)
    return text.make(
        DecoderArchitecture,
        runner=read_language_model(text, head_dim, rope or read_rope(text, head_dim), default_kv_heads=32),
        intermediate_size=text.size("intermediate_size"),
        epsilon=text.number("rms_norm_eps", 1e-6),
        prefix=prefix,
        qkv_bias=True,
        sliding_windows=read_sliding_windows(text),
    )


def read(checkpoint: Path, config: ConfigSection, weights: Weights) -> Model:
    """Read a checkpoint; see `Family`."""
    check_decoder_sizes(config, weights, "model")
    return make_text_model(checkpoint, config, weights, read_decoder(config))


FAMILY = Family("qwen2", ("qwen2",), read)
