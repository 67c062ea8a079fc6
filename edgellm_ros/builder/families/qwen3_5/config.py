# SPDX-License-Identifier: Apache-2.0
"""Reads and checks the text part of `config.json` of Qwen3.5.

Defaults are those of transformers' configuration class.
"""

from __future__ import annotations

import dataclasses

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.config.rope import read_position_limit, read_rope, rope_section
from edgellm_ros.builder.config.text_model import read_norm
from edgellm_ros.builder.families.qwen3_vl.config import interleaved_mrope
from edgellm_ros.builder.model.decoder import (
    Attention,
    Decoder,
    Residual,
    SwiGLU,
    attention_layer,
    transformer_layer,
)
from edgellm_ros.builder.model.recurrent import DeltaNet
from edgellm_ros.engine_directory.language_model_config import LanguageModelConfig
from edgellm_ros.engine_directory.recurrent_config import ATTENTION, RECURRENT, RecurrentConfig
from edgellm_ros.engine_directory.rope_config import RopeConfig

LAYERS = {"linear_attention": RECURRENT, "full_attention": ATTENTION}
ROTATED_SHARE = 0.25  # of a head, for checkpoints without partial_rotary_factor
MROPE_SECTION = 11, 11, 10  # for checkpoints without mrope_section


def read_decoder(text: ConfigSection, prefix: str, with_images: bool) -> Decoder:
    """Read the text section; `prefix` is that of the tensors' names.

    with_images: whether prompts may have images, whose tokens have a row and a column as position.
    ValueError for anything that the graph would compute differently.
    """
    text.one_of("hidden_act", ["silu"], default="silu")
    if text.integer("num_experts", 0):
        raise text.mixture_of_experts("num_experts", "layers are supported")
    types = _layer_types(text)
    norm, head_dim = dataclasses.replace(read_norm(text), shift=1.0), text.size("head_dim", 256)
    net = DeltaNet(
        hidden_size=text.size("hidden_size"),
        key_heads=text.size("linear_num_key_heads", 16),
        value_heads=text.size("linear_num_value_heads", 32),
        key_dim=text.size("linear_key_head_dim", 128),
        value_dim=text.size("linear_value_head_dim", 128),
        conv_kernel=text.size("linear_conv_kernel_dim", 4),
        epsilon=norm.epsilon,
    )
    if net.value_heads % net.key_heads:
        raise text.fail("linear_num_value_heads", f"expected a multiple of {net.key_heads} key heads")
    recurrent = text.make(
        RecurrentConfig,
        kind="gated_delta_net",
        num_layers=types.count(RECURRENT),
        num_heads=net.value_heads,
        key_dim=net.key_dim,
        value_dim=net.value_dim,
        conv_dim=net.conv_dim,
        conv_kernel=net.conv_kernel,
    )
    llm = text.make(
        LanguageModelConfig,
        hidden_size=net.hidden_size,
        num_hidden_layers=len(types),
        num_attention_heads=text.size("num_attention_heads"),
        num_key_value_heads=text.size("num_key_value_heads", 4),
        head_dim=head_dim,
        vocab_size=text.size("vocab_size"),
        max_position_embeddings=read_position_limit(text)[0],
        reduced_vocab_size=0,
        num_deepstack_features=0,
        rope=_rope(text, head_dim, with_images),
        layer_types=types,
        recurrent=recurrent,
    )
    bias, mlp = text.flag("attention_bias", False), SwiGLU(text.size("intermediate_size"))
    attention = Attention(qkv_bias=bias, output_bias=bias, head_norms=True, gated=True)
    layers = {
        ATTENTION: attention_layer(attention, mlp),
        RECURRENT: transformer_layer(Residual("input_layernorm", "linear_attn", net), mlp),
    }
    return Decoder(config=llm, layers=tuple(layers[kind] for kind in types), norm=norm, prefix=prefix)


def _rope(text: ConfigSection, head_dim: int, with_images: bool) -> RopeConfig:
    """Read RoPE of a part of each head.

    Without images `mrope_section` has no effect: a token of text has the same position on all axes.
    """
    given = text.has("partial_rotary_factor") or rope_section(text).has("partial_rotary_factor")
    data = text.data if given else {**text.data, "partial_rotary_factor": ROTATED_SHARE}
    plain = read_rope(ConfigSection(data, text.where), head_dim, partial_heads=True)
    return interleaved_mrope(text, plain, MROPE_SECTION) if with_images else plain


def _layer_types(text: ConfigSection) -> tuple[str, ...]:
    """Read the kind of each layer.

    Without a list, attention is in every `full_attention_interval`-th one.
    """
    count = text.size("num_hidden_layers")
    interval = text.size("full_attention_interval", 4)
    names = [list(LAYERS)[(i + 1) % interval == 0] for i in range(count)]
    if text.has("layer_types"):
        names = text.data["layer_types"]
    if not isinstance(names, list) or len(names) != count or not all(name in [*LAYERS] for name in names):
        raise text.fail("layer_types", f"expected {count} of {', '.join(LAYERS)}")
    types = tuple(LAYERS[name] for name in names)
    for kind in (RECURRENT, ATTENTION):
        if kind not in types:
            raise text.fail("layer_types", f"expected at least one {kind} layer")
    return types
