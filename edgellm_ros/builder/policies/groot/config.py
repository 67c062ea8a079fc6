# SPDX-License-Identifier: Apache-2.0
"""Reads and checks the configuration of a GR00T.

The checks cover everything that the graphs rely on. Sources: LeRobot 0.6.1, policies/groot/groot_n1_7.py;
NVIDIA Isaac-GR00T, gr00t/model/gr00t_n1d7 and gr00t_n1d6 (branch n1.6-release).
"""

from __future__ import annotations

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.policies.groot.architecture import HEAD, AttentionSizes, Backbone, GrootArchitecture
from edgellm_ros.builder.policies.groot.version import Version
from edgellm_ros.builder.weights.claimed_sizes import check_layers, check_no_more_layers
from edgellm_ros.builder.weights.weights import Weights

VL = "vl_self_attention_cfg"  # key of the layers behind the backbone


def read_architecture(
    config: ConfigSection, version: Version, backbone: Backbone, weights: Weights, embodiment: int
) -> GrootArchitecture:
    """Read the sizes of all graphs.

    config: GR00T's; embodiment: number of the one that is used. ValueError, which names file, key and value,
    for a checkpoint that the graphs would compute differently.
    """
    _check_supported(config, version)
    hidden = config.size("backbone_embedding_dim", 2048)
    for name, size in (
        ("hidden_size", backbone.decoder.config.hidden_size),
        ("out_hidden_size", backbone.vision.out_hidden_size),
    ):
        if size != hidden:
            raise config.fail("backbone_embedding_dim", f"expected {name} {size} of {backbone.where}")
    dit, vl = _read_dit(config, weights), _read_vl(config, version, weights, hidden)
    if config.size("input_embedding_dim", 1536) != dit.width or dit.width % 2:
        raise config.fail(
            "input_embedding_dim", f"expected an even number, the {dit.width} of the DiT's heads"
        )
    inner = config.size("hidden_size", 1024)
    if config.section("diffusion_model_cfg").size("output_dim", 26) != inner:
        raise config.fail("hidden_size", "expected output_dim of diffusion_model_cfg")
    embodiments = config.size("max_num_embodiments", 32)
    if embodiment >= embodiments:
        raise config.fail("max_num_embodiments", f"the embodiment is number {embodiment}")
    horizon = config.size("action_horizon", version.horizon)
    positions = config.size("max_seq_len", 1024) if config.flag("add_pos_embed", True) else 0
    if 0 < positions < horizon:
        raise config.fail("max_seq_len", f"expected at least action_horizon {horizon}")
    return GrootArchitecture(
        backbone=backbone,
        vlln=config.flag("use_vlln", True),
        vl=vl,
        dit=dit,
        text_every=config.size("attend_text_every_n_blocks", 2),
        state_dim=config.size("max_state_dim", version.width),
        action_dim=config.size("max_action_dim", version.width),
        horizon=horizon,
        inner_size=inner,
        positions=positions,
        embodiment=embodiment,
        embodiments=embodiments,
        time_steps=config.size("num_timestep_buckets", 1000),
    )


def _check_supported(config: ConfigSection, version: Version) -> None:
    """Raise ValueError for an option that the graphs do not support."""
    config.one_of("backbone_model_type", [version.backbone], default=version.backbone)
    config.one_of("use_alternate_vl_dit", [True], default=True)
    config.one_of("exclude_state", [False], default=False)
    config.one_of("use_tactile", [False], default=False)
    config.one_of("use_mean_std", [False], default=False)
    config.one_of("state_history_length", [1], default=1)
    if version.vl_layers is None:
        config.one_of(VL, [None], default=None)


def _read_dit(config: ConfigSection, weights: Weights) -> AttentionSizes:
    section = config.section("diffusion_model_cfg")
    section.one_of("interleave_self_attention", [True], default=False)
    section.one_of("norm_type", ["ada_norm"], default="ada_norm")
    section.one_of("norm_elementwise_affine", [False], default=False)
    return _read_attention(section, weights, f"{HEAD}.model.transformer_blocks")


def _read_vl(config: ConfigSection, version: Version, weights: Weights, hidden: int) -> AttentionSizes:
    """Read the layers behind the backbone.

    There are none with null or 0 layers; without the key they are those of the version.
    """
    key, modules = VL, f"{HEAD}.vl_self_attention.transformer_blocks"
    data = {**config.data, key: config.data.get(key, version.vl_layers) or {"num_layers": 0}}
    section = ConfigSection(data, config.where).section(key)
    if section.data.get("num_layers") == 0:
        check_no_more_layers(section, "num_layers", 0, weights, modules)
        return AttentionSizes(0, 1, hidden)
    sizes = _read_attention(section, weights, modules)
    if sizes.width != hidden:
        raise section.fail("attention_head_dim", f"expected heads of {hidden} values together")
    return sizes


def _read_attention(section: ConfigSection, weights: Weights, modules: str) -> AttentionSizes:
    """Read the sizes of layers, and check what all have in common."""
    section.one_of("positional_embeddings", [None], default="sinusoidal")
    section.one_of("activation_fn", ["gelu-approximate"], default="gelu-approximate")
    section.one_of("attention_bias", [True], default=True)
    section.one_of("upcast_attention", [False], default=False)
    check_layers(section, "num_layers", weights, modules, default=12)
    heads, head_dim = section.size("num_attention_heads", 8), section.size("attention_head_dim", 64)
    layers = section.size("num_layers", 12)
    check_no_more_layers(section, "num_layers", layers, weights, modules)
    return AttentionSizes(layers, heads, head_dim)
