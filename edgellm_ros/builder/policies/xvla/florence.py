# SPDX-License-Identifier: Apache-2.0
"""Reads the Florence-2 of an X-VLA, in both layouts that LeRobot has saved.

LeRobot 0.4 and 0.5 have a copy of Microsoft's code, 0.6 takes the model of transformers. Keys and tensors
have the names of transformers here.

Sources: LeRobot 0.4.4, policies/xvla/configuration_florence2.py and modeling_florence2.py; 0.6.1,
configuration_xvla.py and modeling_xvla.py; transformers, configuration_florence2.py.
"""

from __future__ import annotations

import re

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.policies.lerobot import MOST_PIXELS
from edgellm_ros.builder.policies.xvla.architecture import (
    EMBEDDING,
    ENCODER,
    PROJECTOR,
    TOWER,
    VLM,
    DaViT,
    Stage,
    TextEncoder,
)
from edgellm_ros.builder.weights.weights import Weights

STAGE_KEYS = {  # of a vision section, a value for each stage: Stage's name
    "embed_dim": "size", "depths": "depth", "num_heads": "heads", "num_groups": "groups",
    "patch_size": "kernel", "patch_stride": "stride", "patch_padding": "padding",
}  # fmt: skip
OTHER_KEYS = ("patch_prenorm", "window_size", "projection_dim")
TEXT_KEYS = (
    "vocab_size", "d_model", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim",
    "max_position_embeddings",
)  # fmt: skip
SHARED = f"{VLM}.language_model.shared.weight"
OLDER_NAMES = (  # of Microsoft's layout, below VLM: pattern -> name in transformers
    (r"vision_tower\.convs\.(\d+)\.proj\.", r"vision_tower.convs.\1.conv."),
    (r"(vision_tower\.blocks\..*)\.conv([12])\.fn\.dw\.", r"\1.conv\2."),
    (r"(vision_tower\.blocks\..*)\.(?:window|channel)_attn\.norm\.", r"\1.norm1."),
    (r"(vision_tower\.blocks\..*)\.(window|channel)_attn\.fn\.", r"\1.\2_attn."),
    (r"(vision_tower\.blocks\..*)\.ffn\.norm\.", r"\1.norm2."),
    (r"(vision_tower\.blocks\..*)\.ffn\.fn\.net\.", r"\1.ffn."),
    (r"image_projection$", r"multi_modal_projector.image_projection.weight"),
    (r"image_proj_norm\.", r"multi_modal_projector.image_proj_norm."),
    (r"image_pos_embed\.", r"multi_modal_projector.image_position_embed."),
    (r"visual_temporal_embed\.", r"multi_modal_projector.visual_temporal_embed."),
    (r"language_model\.model\.", r"language_model."),
)


def is_older(weights: Weights) -> bool:
    """Tell whether tensors have the names of Microsoft's layout."""
    return f"{VLM}.image_projection" in weights or weights.has_module(f"{VLM}.language_model.model")


def canonical_weights(weights: Weights) -> Weights:
    """Return the tensors under their names in transformers.

    Files have one or two copies of the table of words. ValueError for two tensors of one name.
    """
    names: dict[str, str] = {}
    older = is_older(weights)
    for stored in weights:
        name = _newer_name(stored) if older else stored
        if name in names:
            raise ValueError(f"{weights.where}: {stored!r} and {names[name]!r} are the same tensor")
        names[name] = stored
    if SHARED in names:
        names[EMBEDDING] = names[SHARED]  # the one that words are looked up in
    return weights.renamed(names)


def _newer_name(stored: str) -> str:
    prefix = f"{VLM}."
    if not stored.startswith(prefix):
        return stored
    own = stored.removeprefix(prefix)
    for pattern, replacement in OLDER_NAMES:
        changed, count = re.subn(f"^{pattern}", replacement, own)
        if count:
            return prefix + changed
    return stored


def read_tower(vision: ConfigSection, image_size: int, weights: Weights, older: bool) -> DaViT:
    """Read the sizes of the vision tower.

    older: whether tensors are in Microsoft's layout.
    """
    vision = vision.canonical({"embed_dim": "dim_embed"})
    vision.one_of("model_type", ["davit", "florence_vision", "florence2_vision"], default="davit")
    vision.require((*STAGE_KEYS, *OTHER_KEYS))
    vision.one_of("activation_function", ["gelu"], default="gelu")
    vision.one_of("in_channels", [3], default=3)
    vision.one_of("mlp_ratio", [4, 4.0], default=4)
    vision.one_of("qkv_bias", [True], default=True)
    sources = ["spatial_avg_pool", "temporal_avg_pool"]
    vision.one_of("image_feature_source", [None, sources])
    for key, kind in (("image_pos_embed", "learned_abs_2d"), ("visual_temporal_embedding", "COSINE")):
        if vision.has(key):
            vision.section(key).one_of("type", [kind])
    tower = DaViT(
        stages=_read_stages(vision, weights),
        window=vision.size("window_size", most=MOST_PIXELS),
        positions=_read_positions(vision, weights),
        times=_read_times(vision),
        image_size=image_size,
        transposed=older,
    )
    if tower.side > tower.positions:
        raise vision.fail("patch_stride", f"{tower.side} places of a side, but {tower.positions} positions")
    return tower


def _read_stages(vision: ConfigSection, weights: Weights) -> tuple[Stage, ...]:
    columns = {name: vision.integers(key) for key, name in STAGE_KEYS.items()}
    firsts = vision.data["patch_prenorm"]
    count = len(columns["size"])
    if not isinstance(firsts, list) or not all(isinstance(each, bool) for each in firsts):
        raise vision.fail("patch_prenorm", "expected a list of true and false")
    if firsts[:1] == [True]:
        raise vision.fail("patch_prenorm", "supported: false first; LeRobot 0.5 would leave out this norm")
    lengths = {key: len(columns[name]) for key, name in STAGE_KEYS.items()} | {"patch_prenorm": len(firsts)}
    wrong = next((key for key, length in lengths.items() if length != count or not count), None)
    if wrong is not None:
        raise vision.fail(wrong, f"expected a value for each of the {count} stages of embed_dim")
    for key, name in STAGE_KEYS.items():
        least = 0 if name in ("padding", "depth") else 1
        if min(columns[name]) < least or max(columns[name]) > MOST_PIXELS:
            raise vision.fail(key, f"expected integers from {least} to {MOST_PIXELS}")
    stages = []
    for i, first in enumerate(firsts):
        stage = Stage(**{name: values[i] for name, values in columns.items()}, norm_first=first)
        for key, parts in (("num_heads", stage.heads), ("num_groups", stage.groups)):
            if stage.size % parts:
                raise vision.fail(key, f"expected divisors of embed_dim {list(columns['size'])}")
        if stage.padding >= stage.kernel:
            raise vision.fail("patch_padding", f"expected less than patch_size {list(columns['kernel'])}")
        found = weights.list_length(f"{TOWER}.blocks.{i}")
        if stage.depth != found:
            raise vision.fail("depths", f"{weights.where.name} has {found} blocks of stage {i}")
        stages.append(stage)
    if weights.list_length(f"{TOWER}.convs") != count:
        raise vision.fail("embed_dim", f"{weights.where.name} has other stages")
    return tuple(stages)


def _read_positions(vision: ConfigSection, weights: Weights) -> int:
    """Read the number of learned rows and columns.

    Without a key it is that of the tensor.
    """
    found = weights.shape(f"{PROJECTOR}.image_position_embed.row_embeddings.weight")[0]
    section, key = vision, "max_position_embeddings"
    if vision.has("image_pos_embed"):
        section, key = vision.section("image_pos_embed"), "max_pos_embeddings"
    if section.size(key, found) != found:
        raise section.fail(key, f"{weights.where.name} has {found}")
    return found


def _read_times(vision: ConfigSection) -> int:
    """Read the number of positions in time."""
    if vision.has("visual_temporal_embedding"):
        return vision.section("visual_temporal_embedding").size("max_temporal_embeddings")
    return vision.size("max_temporal_embeddings", 100)


def read_text(florence: ConfigSection, weights: Weights) -> TextEncoder:
    """Read the sizes of the text encoder; the padding token is not known yet."""
    text = florence.section("text_config")
    text.one_of("model_type", ["florence2_language", "bart"], default="florence2_language")
    text.require(TEXT_KEYS)
    text.one_of("activation_function", ["gelu"], default="gelu")
    text.one_of("scale_embedding", [False], default=False)
    hidden, heads = text.size("d_model"), text.size("encoder_attention_heads")
    for section in (florence.section("vision_config"), florence):
        if section.size("projection_dim", hidden) != hidden:
            raise section.fail("projection_dim", f"expected d_model of text_config, {hidden}")
    if hidden % heads:
        raise text.fail("encoder_attention_heads", f"expected a divisor of d_model {hidden}")
    layers, found = text.size("encoder_layers"), weights.list_length(f"{ENCODER}.layers")
    if layers != found:
        raise text.fail("encoder_layers", f"{weights.where.name} has {found} layers of {ENCODER}.layers")
    return TextEncoder(
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        inner_size=text.size("encoder_ffn_dim"),
        vocab_size=text.size("vocab_size"),
        positions=text.size("max_position_embeddings"),
        pad_token=0,
    )
