# SPDX-License-Identifier: Apache-2.0
"""Reads and checks the configuration of a GR00T N1.7, and that of its Qwen3-VL.

The checks cover everything that the graphs rely on. Sources: LeRobot 0.6.1, policies/groot/groot_n1_7.py;
NVIDIA Isaac-GR00T, gr00t/model/gr00t_n1d7.
"""

from __future__ import annotations

from pathlib import Path

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection, read_processor, read_section
from edgellm_ros.builder.config.image_processing import IMAGE_PROCESSOR
from edgellm_ros.builder.families.qwen3_vl import DEFAULTS, MERGERS
from edgellm_ros.builder.families.qwen3_vl.config import read_decoder, vision_architecture
from edgellm_ros.builder.policies.groot.architecture import HEAD, AttentionSizes, GrootArchitecture
from edgellm_ros.builder.weights.claimed_sizes import check_decoder_sizes, check_layers
from edgellm_ros.builder.weights.weights import Weights

BACKBONES = "backbone.model.model", "backbone.model"  # of the tensors, by version of transformers
LM_HEAD = "backbone.model.lm_head.weight"


def find_backbone(weights: Weights) -> str:
    """Find what the names of the backbone's tensors begin with."""
    found = (each for each in BACKBONES if weights.has_module(f"{each}.language_model"))
    return next(found, BACKBONES[0])


def read_architecture(
    config: ConfigSection, vlm: Path, weights: Weights, embodiment: int
) -> GrootArchitecture:
    """Read the sizes of all graphs.

    config: GR00T's; vlm: the folder of its Qwen3-VL; embodiment: number of the one that is used. ValueError,
    which names file, key and value, for a checkpoint that the graphs would compute differently.
    """
    _check_supported(config)
    section, backbone = read_section(vlm / "config.json"), find_backbone(weights)
    section.one_of("model_type", ["qwen3_vl"])
    tower, text = section.section("vision_config"), section.section("text_config")
    layers = min(text.size("num_hidden_layers"), config.size("select_layer", 16))
    text = ConfigSection({**text.data, "num_hidden_layers": layers}, text.where)
    check_layers(tower, "depth", weights, f"{backbone}.visual.blocks")
    check_decoder_sizes(text, weights, f"{backbone}.language_model")
    processor = read_processor(vlm, IMAGE_PROCESSOR)
    vision = vision_architecture(tower, processor, f"{backbone}.visual", MERGERS)
    levels = vision.config.num_deepstack_features
    if layers <= levels:  # the reference takes the last layer's result before it adds a feature of the tower
        raise config.fail("select_layer", f"expected more layers than the {levels} deepstack features")
    decoder = read_decoder(text, f"{backbone}.language_model", levels, DEFAULTS)
    hidden = config.size("backbone_embedding_dim", 2048)
    for name, size in (
        ("hidden_size", decoder.config.hidden_size),
        ("out_hidden_size", vision.config.out_hidden_size),
    ):
        if size != hidden:
            raise config.fail("backbone_embedding_dim", f"expected {name} {size} of {section.where}")
    dit, vl = _read_dit(config, weights), _read_vl(config, weights, hidden)
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
    horizon = config.size("action_horizon", 40)
    positions = config.size("max_seq_len", 1024) if config.flag("add_pos_embed", True) else 0
    if 0 < positions < horizon:
        raise config.fail("max_seq_len", f"expected at least action_horizon {horizon}")
    return GrootArchitecture(
        decoder=decoder,
        vision=vision,
        vlln=config.flag("use_vlln", True),
        vl=vl,
        dit=dit,
        text_every=config.size("attend_text_every_n_blocks", 2),
        state_dim=config.size("max_state_dim", 132),
        action_dim=config.size("max_action_dim", 132),
        horizon=horizon,
        inner_size=inner,
        positions=positions,
        embodiment=embodiment,
        embodiments=embodiments,
        time_steps=config.size("num_timestep_buckets", 1000),
    )


def _check_supported(config: ConfigSection) -> None:
    """Raise ValueError for an option that the graphs do not support."""
    config.one_of("backbone_model_type", ["qwen"], default="qwen")
    config.one_of("use_alternate_vl_dit", [True], default=True)
    config.one_of("reproject_vision", [False], default=False)
    config.one_of("exclude_state", [False], default=False)
    config.one_of("use_tactile", [False], default=False)
    config.one_of("use_mean_std", [False], default=False)
    config.one_of("state_history_length", [1], default=1)


def _read_dit(config: ConfigSection, weights: Weights) -> AttentionSizes:
    section = config.section("diffusion_model_cfg")
    section.one_of("interleave_self_attention", [True], default=False)
    section.one_of("norm_type", ["ada_norm"], default="ada_norm")
    section.one_of("norm_elementwise_affine", [False], default=False)
    return _read_attention(section, weights, f"{HEAD}.model.transformer_blocks")


def _read_vl(config: ConfigSection, weights: Weights, hidden: int) -> AttentionSizes:
    if not config.data.get("vl_self_attention_cfg"):
        return AttentionSizes(0, 1, hidden)
    section = config.section("vl_self_attention_cfg")
    if section.data.get("num_layers") == 0:
        return AttentionSizes(0, 1, hidden)
    sizes = _read_attention(section, weights, f"{HEAD}.vl_self_attention.transformer_blocks")
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
    return AttentionSizes(section.size("num_layers", 12), heads, head_dim)
