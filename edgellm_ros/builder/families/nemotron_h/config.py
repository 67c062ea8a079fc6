# SPDX-License-Identifier: Apache-2.0
"""Reads and checks `config.json` of Nemotron-H."""

from __future__ import annotations

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.config.rope import read_position_limit, read_rope
from edgellm_ros.builder.model.decoder import Attention, Block, Decoder, Residual, RMSNorm, SquaredReLU
from edgellm_ros.builder.model.recurrent import Mamba2
from edgellm_ros.engine_directory.language_model_config import LanguageModelConfig
from edgellm_ros.engine_directory.recurrent_config import ATTENTION, MLP, RECURRENT, RecurrentConfig

MODEL_TYPE = "nemotron_h"
EXPERTS = "moe"
DEFAULT_HEAD_DIM = 128  # the model code's, whatever hidden_size / num_attention_heads is
LETTERS = {"M": RECURRENT, "*": ATTENTION, "-": MLP, "E": EXPERTS}  # of hybrid_override_pattern
NAMES = {  # of layers_block_type, with the names before transformers 5.9
    "linear_attention": RECURRENT,
    "mamba": RECURRENT,
    "full_attention": ATTENTION,
    "attention": ATTENTION,
    "mlp": MLP,
    "moe": EXPERTS,
}


def read_decoder(config: ConfigSection, prefix: str) -> Decoder:
    """Read the configuration; `prefix` is that of the tensors' names.

    ValueError for anything that the graph would compute differently.
    """
    config.one_of("mlp_hidden_act", ["relu2"], default="relu2")
    config.one_of("mamba_hidden_act", ["silu"], default="silu")
    config.one_of("residual_in_fp32", [False], default=False)
    config.one_of("attention_bias", [False], default=False)
    if config.has("sliding_window"):
        raise config.fail("sliding_window", "only full attention (null) is supported")
    types = _layer_types(config)
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    head_dim = config.size("head_dim", config.size("attention_head_dim", DEFAULT_HEAD_DIM))
    epsilon = config.number("layer_norm_epsilon", 1e-5)
    mamba = Mamba2(
        hidden_size=hidden,
        heads=config.size("mamba_num_heads"),
        head_dim=config.size("mamba_head_dim"),
        groups=config.size("n_groups"),
        state_size=config.size("ssm_state_size"),
        conv_kernel=config.size("conv_kernel"),
        conv_bias=config.flag("use_conv_bias", True),
        bias=config.flag("use_bias", False),
        epsilon=epsilon,
        time_step_min=config.number("time_step_min", 0.001),
    )
    if mamba.heads % mamba.groups:
        raise config.fail("mamba_num_heads", f"expected a multiple of n_groups {mamba.groups}")
    recurrent = config.make(
        RecurrentConfig,
        kind="mamba2",
        num_layers=types.count(RECURRENT),
        num_heads=mamba.heads,
        key_dim=mamba.state_size,
        value_dim=mamba.head_dim,
        conv_dim=mamba.conv_dim,
        conv_kernel=mamba.conv_kernel,
    )
    llm = config.make(
        LanguageModelConfig,
        hidden_size=hidden,
        num_hidden_layers=len(types),
        num_attention_heads=heads,
        num_key_value_heads=config.size("num_key_value_heads", heads),
        head_dim=head_dim,
        vocab_size=config.size("vocab_size"),
        max_position_embeddings=read_position_limit(config)[0],
        reduced_vocab_size=0,
        num_deepstack_features=0,
        rope=read_rope(config, head_dim),  # for the runtime's tables; no layer has RoPE
        layer_types=types,
        recurrent=recurrent,
    )
    blocks: dict[str, Block] = {
        RECURRENT: mamba,
        ATTENTION: Attention(rope=False),
        MLP: SquaredReLU(config.size("intermediate_size"), config.flag("mlp_bias", False)),
    }
    return Decoder(
        config=llm,
        layers=tuple((Residual("norm", "mixer", blocks[kind]),) for kind in types),
        norm=RMSNorm(epsilon),
        prefix=prefix,
        last_norm="norm_f",
        table="embeddings",
    )


def _layer_types(config: ConfigSection) -> tuple[str, ...]:
    """Read the kind of each layer.

    The configuration has a list of names, or a pattern of letters before transformers 5.
    """
    key = next((key for key in ("layers_block_type", "layer_types") if config.has(key)), None)
    known, given = (NAMES, config.data[key]) if key else (LETTERS, config.data.get("hybrid_override_pattern"))
    key = key or "hybrid_override_pattern"
    if not isinstance(given, str if known is LETTERS else list) or not given:
        raise config.fail(key, "expected the kind of each layer")
    for name in given:
        if name not in known:
            raise config.fail(key, f"unknown kind of layer {name!r}; supported: {', '.join(known)}")
    types = tuple(known[name] for name in given)
    if EXPERTS in types:
        reason = f"layers are supported; layer {types.index(EXPERTS)} has experts"
        raise config.mixture_of_experts(key, reason)
    for kind in (RECURRENT, ATTENTION):
        if kind not in types:
            raise config.fail(key, f"expected at least one {kind} layer")
    return types
