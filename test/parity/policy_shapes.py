# SPDX-License-Identifier: Apache-2.0
"""Sizes of the random policies that are compared with LeRobot's.

The module needs neither PyTorch nor LeRobot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PolicyShape:
    """Sizes of an ACT or a Diffusion Policy.

    policy: further values of LeRobot's configuration.
    """

    cameras: Mapping[str, tuple[int, int]]  # height and width of the frames
    state: int = 6  # 0 = none
    environment: int = 0
    efforts: int = 0  # of an observation that no policy computes with
    actions: int = 5
    ways: Mapping[str, str] = field(default_factory=dict)  # of normalisation, by kind
    policy: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class SmolVLAShape:
    """Sizes of a tiny SmolVLA; `policy`: further values of LeRobot's configuration."""

    cameras: Mapping[str, tuple[int, int]]  # height and width of the frames
    state: int = 6
    actions: int = 7
    hidden: int = 48
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    vlm_layers: int = 6
    vision_hidden: int = 32
    vision_heads: int = 2
    vision_depth: int = 2
    image_size: int = 64
    patch_size: int = 8
    scale_factor: int = 2
    ways: Mapping[str, str] = field(default_factory=lambda: MEAN_STD)  # of normalisation, by kind
    policy: Mapping[str, object] = field(default_factory=dict)


ACT_SHAPES = {
    "defaults": PolicyShape({"top": (48, 64), "wrist": (48, 64)}),
    "one camera, odd size": PolicyShape(
        {"front": (75, 41)}, state=3, efforts=4, actions=2, policy={"chunk_size": 12}
    ),
    "three cameras of two sizes": PolicyShape(
        {"left": (64, 64), "right": (40, 72), "top": (64, 64)},
        policy={"n_decoder_layers": 2, "n_encoder_layers": 1},
    ),
    "environment, ranges": PolicyShape(
        {"top": (64, 48)},
        environment=4,
        ways={"VISUAL": "IDENTITY", "STATE": "MIN_MAX", "ENV": "MEAN_STD", "ACTION": "MIN_MAX"},
    ),
    "no state": PolicyShape({"top": (64, 48)}, state=0, policy={"use_vae": False}),
    "environment alone, norms first": PolicyShape(
        {"top": (48, 48), "side": (48, 48)},
        state=0,
        environment=3,
        policy={"pre_norm": True, "n_decoder_layers": 3, "feedforward_activation": "gelu"},
    ),
    "resnet34, quantiles": PolicyShape(
        {"top": (56, 64)},
        ways={"VISUAL": "MIN_MAX", "STATE": "QUANTILES", "ACTION": "QUANTILES"},
        policy={"vision_backbone": "resnet34", "dim_model": 24, "n_heads": 3},
    ),
    "resnet50, dilated": PolicyShape(
        {"top": (48, 80)},
        policy={
            "vision_backbone": "resnet50",
            "replace_final_stride_with_dilation": True,
            "temporal_ensemble_coeff": 0.01,
            "n_action_steps": 1,
        },
    ),
}
MEAN_STD, MIN_MAX, QUANTILES = (
    {"VISUAL": "IDENTITY", "STATE": way, "ACTION": way} for way in ("MEAN_STD", "MIN_MAX", "QUANTILES")
)
SMOLVLA_SHAPES = {
    "two cameras": SmolVLAShape({"top": (48, 64), "wrist": (40, 40)}, policy={"prefix_length": 0}),
    "padded task, other grid": SmolVLAShape(
        {"top": (90, 70), "left": (33, 77)},
        hidden=24,
        heads=3,
        kv_heads=1,
        head_dim=12,
        scale_factor=4,
        image_size=32,
        policy={
            "num_vlm_layers": 5,
            "self_attn_every_n_layers": 3,
            "pad_language_to": "max_length",
            "prefix_length": 90,
            "empty_cameras": 1,
            "chunk_size": 5,
            "n_action_steps": 5,
            "num_steps": 7,
        },
    ),
    "self-attention only": SmolVLAShape(
        {"front": (64, 64)},
        state=3,
        actions=2,
        ways=MIN_MAX,
        policy={
            "attention_mode": "self_attn",
            "expert_width_multiplier": 0.5,
            "max_state_dim": 12,
            "max_action_dim": 10,
        },
    ),
    "one camera, quantiles": SmolVLAShape({"top": (50, 60)}, state=2, actions=3, ways=QUANTILES),
    "three cameras, wide expert": SmolVLAShape(
        {"left": (64, 64), "right": (20, 90), "top": (64, 48)},
        hidden=32,
        vision_depth=1,
        policy={"expert_width_multiplier": 1.0, "num_vlm_layers": 2, "num_steps": 3},
    ),
    "one key head, state in full": SmolVLAShape(
        {"top": (64, 64)},
        state=9,
        actions=9,
        kv_heads=1,
        head_dim=8,
        policy={"max_state_dim": 9, "max_action_dim": 9, "num_vlm_layers": 3, "self_attn_every_n_layers": 1},
    ),
    "small patches, long chunk": SmolVLAShape(
        {"top": (30, 64), "wrist": (64, 30)},
        image_size=32,
        patch_size=4,
        policy={"resize_imgs_with_padding": (32, 32), "chunk_size": 21, "min_period": 0.01, "num_steps": 5},
    ),
    "no cross-attention in between, all layers": SmolVLAShape(
        {"front": (48, 48)},
        vlm_layers=3,
        ways=MIN_MAX,
        policy={"num_vlm_layers": 0, "self_attn_every_n_layers": 0, "num_steps": 4},
    ),
}
