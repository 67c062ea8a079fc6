# SPDX-License-Identifier: Apache-2.0
"""Reads what the configurations of many decoders have in common.

Defaults are those of transformers' configuration classes; a checkpoint may leave out what equals them.
"""

from __future__ import annotations

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.config.rope import read_position_limit
from edgellm_ros.builder.model.decoder import RMSNorm
from edgellm_ros.engine_directory.language_model_config import LanguageModelConfig
from edgellm_ros.engine_directory.rope_config import RopeConfig


def read_language_model(
    text: ConfigSection,
    head_dim: int,
    rope: RopeConfig,
    default_kv_heads: int | None = None,
    num_deepstack_features: int = 0,
) -> LanguageModelConfig:
    """Read the shape of a decoder from its section.

    default_kv_heads: for checkpoints without the key; None, as null in the checkpoint, is one for each
    attention head. ValueError for layers that the shared decoder computes differently.
    """
    text.one_of("hidden_act", ["silu"], default="silu")
    heads, layers = text.size("num_attention_heads"), text.size("num_hidden_layers")
    given = "num_key_value_heads" in text.data
    if num_deepstack_features > layers:
        raise text.fail(
            "num_hidden_layers", f"expected at least the {num_deepstack_features} deepstack features"
        )
    return text.make(
        LanguageModelConfig,
        hidden_size=text.size("hidden_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=text.size("num_key_value_heads", heads if given else default_kv_heads or heads),
        head_dim=head_dim,
        vocab_size=text.size("vocab_size"),
        max_position_embeddings=read_position_limit(text)[0],
        reduced_vocab_size=0,
        num_deepstack_features=num_deepstack_features,
        rope=rope,
    )


def read_head_dim(text: ConfigSection, default: int | None = None) -> int:
    """Read the head size.

    A missing key is `default` or, as null, the share of each head in hidden_size.
    """
    if "head_dim" not in text.data and default is not None:
        return default
    hidden, heads = text.size("hidden_size"), text.size("num_attention_heads")
    if not text.has("head_dim") and heads > hidden:
        raise text.fail("num_attention_heads", f"expected at most hidden_size {hidden} without head_dim")
    return text.size("head_dim", hidden // heads)


def read_norm(text: ConfigSection) -> RMSNorm:
    """Read what the RMSNorms have in common."""
    epsilon = text.number("rms_norm_eps", 1e-6)
    if epsilon < 0:
        raise text.fail("rms_norm_eps", "expected at least 0")
    return RMSNorm(epsilon)


def read_sliding_windows(text: ConfigSection) -> tuple[int | None, ...]:
    """Read the sliding window of each layer as Qwen2 and Qwen3 do.

    `layer_types` names the layers with one; without it, those from `max_window_layers` on have one. No layer
    has one unless `use_sliding_window` is true.
    """
    layers, window = text.size("num_hidden_layers"), None
    if text.flag("use_sliding_window", False) and text.data.get("sliding_window", 4096) is not None:
        window = text.size("sliding_window", 4096)
    if not text.has("layer_types"):
        first = text.integer("max_window_layers", 28)
        return tuple(window if i >= first else None for i in range(layers))
    types = text.data["layer_types"]
    if not isinstance(types, list) or len(types) != layers:
        raise text.fail("layer_types", f"expected a list of {layers} types of layers")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise text.fail("layer_types", f"{kind!r} is not supported: full_attention, sliding_attention")
        if kind == "sliding_attention" and window is None:
            raise text.fail("layer_types", "sliding_attention needs use_sliding_window and sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in types)
