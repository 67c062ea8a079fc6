# SPDX-License-Identifier: Apache-2.0
"""Random GR00Ts, and their observations.

The tests, and the program that runs LeRobot's model, make the same ones. Needs neither LeRobot nor PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from edgellm_ros.kernels.random import normal_noise
from fixtures.groot_checkpoint import OTHER, GrootShape

SAMPLES, NOISE_SEED = 2, 5
EXECUTED, DELAY, END = 1, 1, 3  # of the chunk that continues one
ARM = {"rep": "RELATIVE", "type": "NON_EEF", "format": "DEFAULT", "state_key": None}
POSE = {"rep": "RELATIVE", "type": "EEF", "format": "XYZ_ROT6D", "state_key": "tip"}
STATS = {
    "observation.state": {"min": [-2.0, -1, 0, 3], "max": [1.0, 1, 0, 5]},
    "action": {"min": [-1.0, -2, -3, 0], "max": [2.0, 2, 2, 0]},
}
SQUARES = {"use_albumentations": False, "image_crop_size": [28, 28], "crop_fraction": None}


@dataclass(frozen=True)
class GrootCase:
    """A checkpoint and one observation.

    stats: of whole vectors, for an embodiment of which the checkpoint has none; saved: whether the engine is
    that of the folder that LeRobot saves.
    """

    shape: GrootShape
    size: tuple[int, int]  # height and width of the frames
    task: str
    stats: Mapping[str, Mapping[str, list[float]]] = field(default_factory=dict)
    saved: bool = False

    @property
    def frames(self) -> dict[str, np.ndarray]:
        return self._observation()[0]

    @property
    def state(self) -> np.ndarray:
        return self._observation()[1]

    def _observation(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        rng, shape = np.random.default_rng(1), self.shape
        frames = {name: rng.integers(0, 256, (*self.size, 3), dtype=np.uint8) for name in shape.cameras}
        return frames, rng.normal(size=sum(shape.state.values())).astype(np.float32) * 2

    @property
    def noise(self) -> np.ndarray:
        """Return the noise [n,T,A] of a request."""
        size = self.shape.horizon, self.shape.model_dim
        return normal_noise(NOISE_SEED, SAMPLES, size[0] * size[1]).reshape(SAMPLES, *size)

    @property
    def previous(self) -> np.ndarray:
        """Return normalised actions of the previous chunk."""
        size = self.shape.steps, sum(self.shape.actions.values())
        return np.random.default_rng(3).uniform(-1, 1, size).astype(np.float32)


CASES = {
    "two cameras": GrootCase(GrootShape(), (48, 64), "Pick up: the Cube!"),
    "one camera, no task": GrootCase(GrootShape(cameras=("front",), layers=4, vl_layers=2), (64, 48), ""),
    "ranges of all values, as they are": GrootCase(
        GrootShape(settings={"use_percentiles": False, "clip_outliers": False, "formalize_language": False}),
        (40, 40),
        "push the_red cube",
    ),
    "relative joints": GrootCase(GrootShape(representations={"arm": ARM}), (48, 64), "place it"),
    "statistics by step": GrootCase(
        GrootShape(representations={"arm": ARM}, per_step=True, steps=4), (48, 64), "place it"
    ),
    "relative poses": GrootCase(
        GrootShape(
            state={"gripper": 1, "tip": 9},
            actions={"gripper": 1, "pose": 9},
            representations={"pose": POSE},
            model_dim=12,
        ),
        (48, 64),
        "open the drawer",
    ),
    "eight layers, letter box, two times": GrootCase(
        GrootShape(
            dit_layers=8, heads=3, head_dim=8, frames=(-15, 0), settings={"letter_box_transform": True}
        ),
        (30, 64),
        "stack the blocks",
    ),
    "no layers between, no positions": GrootCase(
        GrootShape(
            vl_layers=0,
            horizon=5,
            config={"add_pos_embed": False, "use_vlln": False, "num_inference_timesteps": 7},
            settings={"crop_fraction": None},
        ),
        (48, 64),
        "wipe the table",
    ),
    "saved statistics by key": GrootCase(
        GrootShape(representations={"arm": ARM}, per_step=True), (48, 64), "Pick up: the Cube!", saved=True
    ),
    "saved statistics of vectors": GrootCase(
        GrootShape(robots=(OTHER,), settings=SQUARES), (48, 64), "Pick up: the Cube!", STATS, saved=True
    ),
}
CROPS = [(size, box) for size in ((480, 640), (100, 33), (64, 64), (360, 640)) for box in (False, True)]
SQUARED = [(size, own) for size in ((480, 640), (100, 33), (64, 64)) for own in (False, True)]
CROP_SETTINGS = {
    "image_target_size": [64, 64],
    "image_crop_size": [60, 60],
    "shortest_image_edge": 64,
    "crop_fraction": 0.95,
}
SQUARE_SETTINGS = {"image_target_size": [64, 64], "image_crop_size": [56, 56]}


def picture(size: tuple[int, int], low: int = 0, high: int = 256) -> np.ndarray:
    """Make a random image [H,W,3] uint8 of values from `low` up to `high`."""
    return np.random.default_rng(0).integers(low, high, (*size, 3), dtype=np.uint8)


def image_key(kind: str, size: tuple[int, int], option: bool) -> str:
    """Return the name of an image that LeRobot has resized."""
    return f"{kind} {size[0]}x{size[1]} {option}"
