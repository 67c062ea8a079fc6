# SPDX-License-Identifier: Apache-2.0
"""Sizes of the random X-VLAs that are compared with LeRobot's.

The module needs neither PyTorch nor LeRobot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

IDENTITY, MEAN_STD, QUANTILES = (
    {"VISUAL": "IDENTITY", "STATE": way, "ACTION": way} for way in ("IDENTITY", "MEAN_STD", "QUANTILES")
)


@dataclass(frozen=True)
class XVLAShape:
    """Sizes of a tiny X-VLA.

    The values of `stages` are those of the vision tower's stages. `policy`: further values of LeRobot's
    configuration.
    """

    cameras: Mapping[str, tuple[int, int]]  # height and width of the frames
    missing: tuple[str, ...] = ()  # cameras of which there is no frame
    state: int = 8
    actions: int = 20
    hidden: int = 24
    heads: int = 3
    text_layers: int = 2
    sizes: tuple[int, ...] = (8, 12, 16, 20)
    depths: tuple[int, ...] = (1, 1, 2, 1)
    tower_heads: tuple[int, ...] = (2, 3, 4, 5)
    groups: tuple[int, ...] = (2, 2, 4, 2)
    kernels: tuple[int, ...] = (7, 3, 3, 3)
    strides: tuple[int, ...] = (4, 2, 2, 2)
    paddings: tuple[int, ...] = (3, 1, 1, 1)
    norms_first: tuple[bool, ...] = (False, True, True, True)
    window: int = 5
    domain: int = 0
    is_target: bool = False  # whether the processor makes targets of the arm's tip
    ways: Mapping[str, str] = field(default_factory=lambda: IDENTITY)  # of normalisation, by kind
    policy: Mapping[str, object] = field(default_factory=dict)


XVLA_SHAPES = {
    "tip poses": XVLAShape({"image": (48, 64), "image2": (70, 40)}, domain=2),
    "targets, another grid": XVLAShape(
        {"front": (90, 70)},
        actions=7,
        is_target=True,
        window=3,
        policy={"num_denoising_steps": 4, "num_image_views": 3, "resize_imgs_with_padding": (96, 96)},
    ),
    "joints, norms behind": XVLAShape(
        {"left": (64, 64), "right": (33, 77), "top": (64, 48)},
        state=14,
        actions=14,
        norms_first=(False, False, False, True),
        strides=(2, 2, 2, 2),
        paddings=(2, 1, 0, 1),
        policy={"action_mode": "joint", "empty_cameras": 1, "use_hetero_proj": True, "max_len_seq": 600},
    ),
    "any robot, normalised": XVLAShape(
        {"front": (60, 80), "arm": (48, 64)},
        state=6,
        actions=6,
        domain=1,
        ways=MEAN_STD,
        policy={"action_mode": "auto", "max_action_dim": 9, "dim_time": 7, "mlp_ratio": 2.5, "depth": 1},
    ),
    "two arms": XVLAShape(
        {"top": (64, 64)},
        state=12,
        actions=12,
        hidden=32,
        heads=4,
        text_layers=1,
        ways=QUANTILES,
        policy={
            "action_mode": "so101_bimanual",
            "max_state_dim": 20,
            "len_soft_prompts": 0,
            "chunk_size": 5,
            "n_action_steps": 3,
        },
    ),
    "a Franka, images as they are": XVLAShape(
        {"image": (64, 64), "image2": (64, 64)},
        state=7,
        actions=7,
        policy={"action_mode": "franka_joint7", "resize_imgs_with_padding": None, "num_denoising_steps": 1},
    ),
    "no grippers, three stages": XVLAShape(
        {"image": (48, 48), "image2": (20, 90)},
        state=20,
        sizes=(8, 12, 20),
        depths=(0, 2, 1),
        tower_heads=(1, 2, 5),
        groups=(1, 3, 4),
        kernels=(5, 3, 2),
        strides=(4, 2, 2),
        paddings=(2, 1, 0),
        norms_first=(False, True, False),
        window=12,
        policy={"action_mode": "agibot_ee6d", "tokenizer_max_length": 40},
    ),
    "the first camera is missing": XVLAShape(
        {"image": (64, 64), "image2": (40, 64), "image3": (64, 40)},
        missing=("image",),
        domain=1,
        policy={"num_denoising_steps": 23, "dtype": "bfloat16"},
    ),
}
