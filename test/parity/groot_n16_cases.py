# SPDX-License-Identifier: Apache-2.0
"""Random GR00Ts N1.6, and their observations.

The tests, and the program that runs the reference, make the same ones. Needs neither LeRobot nor PyTorch.
"""

from __future__ import annotations

from functools import partial

from groot_cases import ARM, POSE, GrootCase

from fixtures.groot_checkpoint import GrootShape
from fixtures.groot_n16_checkpoint import SIDE

LARGE = 160  # pixels of a short side whose patches are more than the points of the position grid
BOX = {"letter_box_transform": True}
SQUARES = {"use_albumentations": False, "image_target_size": [SIDE] * 2, "image_crop_size": [56, 56]}
_shape = partial(GrootShape, side=SIDE)
CASES = {
    "two cameras": GrootCase(_shape(), (48, 64), "Pick up: the Cube!"),
    "one camera, no task, upright": GrootCase(_shape(cameras=("front",), layers=4, side=LARGE), (64, 48), ""),
    "ranges and words as they are": GrootCase(
        _shape(settings={"use_percentiles": False, "clip_outliers": False, "formalize_language": False}),
        (40, 40),
        "\n Push <the> red cube. ",
    ),
    "relative joints, statistics by step": GrootCase(
        _shape(representations={"arm": ARM}, per_step=True, steps=4), (48, 64), "place it "
    ),
    "relative poses": GrootCase(
        _shape(
            state={"gripper": 1, "tip": 9},
            actions={"gripper": 1, "pose": 9},
            representations={"pose": POSE},
            model_dim=12,
            heads=3,
            head_dim=8,
        ),
        (48, 64),
        "open the drawer",
    ),
    "eight layers, letter box, two times": GrootCase(
        _shape(dit_layers=8, frames=(-15, 0), side=LARGE, settings=BOX), (30, 64), "stack the blocks"
    ),
    "no positions, sizes by the target, angles": GrootCase(
        _shape(
            horizon=5,
            layers=5,
            state={"waist": 1, "arm": 3, "hand": 2, "gripper": 1},
            angles=("arm", "hand"),
            config={"add_pos_embed": False, "use_vlln": False, "num_inference_timesteps": 7},
            settings={"crop_fraction": None, "shortest_image_edge": None},
        ),
        (48, 64),
        "wipe the table",
    ),
    "squares in a letter box": GrootCase(
        _shape(settings=SQUARES, config={"attend_text_every_n_blocks": 1}), (48, 64), "close the lid"
    ),
}
