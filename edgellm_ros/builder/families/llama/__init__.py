# SPDX-License-Identifier: Apache-2.0
"""Llama and Mistral, text only.

SmolLM2, TinyLlama and many others have Llama's model type.
"""

from __future__ import annotations

from pathlib import Path

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.config.rope import read_rope
from edgellm_ros.builder.config.text_model import read_head_dim, read_language_model, read_norm
from edgellm_ros.builder.families import Family
from edgellm_ros.builder.families.model import Model, make_model
from edgellm_ros.builder.model.decoder import Decoder, SwiGLU, attention_layers
from edgellm_ros.builder.weights.claimed_sizes import check_decoder_sizes
from edgellm_ros.builder.weights.weights import Weights

MISTRAL = "mistral"
MISTRAL_WINDOW = 4096  # of a checkpoint without the key; null is full attention


def read_decoder(text: ConfigSection, prefix: str = "model") -> Decoder:
    """Read the decoder's section.

    Mistral has no biases, and the same sliding window in all layers; Llama has switches for biases, and no
    sliding window.
    """
    mistral, head_dim = text.data.get("model_type") == MISTRAL, read_head_dim(text)
    llm = read_language_model(text, head_dim, read_rope(text, head_dim), 8 if mistral else None)
    attention_bias = not mistral and text.flag("attention_bias", False)
    window = None
    if mistral and text.data.get("sliding_window", MISTRAL_WINDOW) is not None:
        window = text.size("sliding_window", MISTRAL_WINDOW)
    layers = attention_layers(
        (window,) * llm.num_hidden_layers,
        SwiGLU(text.size("intermediate_size"), bias=not mistral and text.flag("mlp_bias", False)),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
    )
    return Decoder(config=llm, layers=layers, norm=read_norm(text), prefix=prefix)


def read(checkpoint: Path, config: ConfigSection, weights: Weights) -> Model:
    """Read a checkpoint; see `Family`."""
    check_decoder_sizes(config, weights, "model")
    return make_model(checkpoint, config, weights, read_decoder(config))


FAMILY = Family("llama", ("llama", MISTRAL), read)
