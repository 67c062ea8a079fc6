# SPDX-License-Identifier: Apache-2.0
"""Shapes of random pi0 and pi0.5, and their observations.

The tests, and the program that runs LeRobot's models, make the same ones. Needs neither LeRobot nor PyTorch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers.processors import TemplateProcessing

from edgellm_ros.kernels.random import normal_noise
from fixtures.tiny_checkpoint import make_tokenizer

SAMPLES, NOISE_SEED, TASK = 2, 5, " Put the red_cube\ninto the box"
DELAY, GUIDANCE = 1, 10.0  # of the chunk that continues one
BOS = "<|endoftext|>"


@dataclass(frozen=True)
class PiShape:
    """Sizes of a tiny model; `policy`: further values of LeRobot's configuration."""

    kind: str  # "pi0" or "pi05"
    cameras: Mapping[str, tuple[int, int]]  # height and width of the frames
    lerobot: str = "0.6"  # whose processors and padding: "0.4" or "0.6"
    state: int = 6
    actions: int = 5
    hidden: int = 48
    inner: int = 80
    layers: int = 2
    head_dim: int = 16
    expert_hidden: int = 32
    expert_inner: int = 56
    vision_hidden: int = 32
    vision_depth: int = 1
    patch: int = 14
    ways: Mapping[str, str] = field(default_factory=dict)  # of normalisation, by kind
    adapter: bool = False  # whether PEFT trained it
    policy: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        """Return values of LeRobot's configuration."""
        small = {"chunk_size": 6, "n_action_steps": 6, "max_action_dim": 9, "num_inference_steps": 4}
        return {**small, "image_resolution": (56, 56), "device": "cpu", **self.policy}

    @property
    def normalization(self) -> dict[str, str]:
        own = "QUANTILES" if self.kind == "pi05" else "MEAN_STD"
        return {"VISUAL": "IDENTITY", "STATE": own, "ACTION": own} | dict(self.ways)

    def features(
        self,
    ) -> tuple[dict[str, tuple[str, tuple[int, ...]]], dict[str, tuple[str, tuple[int, ...]]]]:
        """Return inputs and outputs: name -> kind and shape."""
        images = {f"observation.images.{n}": ("VISUAL", (3, *size)) for n, size in self.cameras.items()}
        return {**images, "observation.state": ("STATE", (self.state,))}, {
            "action": ("ACTION", (self.actions,))
        }


class Observation:
    """What a robot saw, and the noise; the same for the same seed."""

    def __init__(self, shape: PiShape, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.frames = {
            name: rng.integers(0, 256, (*size, 3), dtype=np.uint8) for name, size in shape.cameras.items()
        }
        self.state = rng.normal(size=shape.state).astype(np.float32)
        self.state[0] = 9  # above all bins
        horizon, values = shape.config["chunk_size"], shape.config["max_action_dim"]
        self.noise = normal_noise(NOISE_SEED, SAMPLES, horizon * values).reshape(SAMPLES, horizon, values)
        self.previous = rng.normal(size=(horizon, shape.actions)).astype(np.float32)  # normalised
        self.stats = {
            key: {
                "mean": rng.normal(size=size).astype(np.float32),
                "std": rng.uniform(0.2, 3.0, size).astype(np.float32),
                "min": rng.uniform(-3, -2, size).astype(np.float32),
                "max": rng.uniform(2, 3, size).astype(np.float32),
                "q01": rng.uniform(-2, -1, size).astype(np.float32),
                "q99": rng.uniform(1, 2, size).astype(np.float32),
            }
            for key, size in (("observation.state", shape.state), ("action", shape.actions))
        }


def write_tokenizer(folder: Path) -> int:
    """Write a tokenizer that puts a token before a text.

    Returns the number of its tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    first = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[first])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": BOS, "bos_token": BOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer.get_vocab_size()


CAMERAS = {"top": (48, 64), "wrist": (40, 40)}
SHAPES = {
    "pi05": PiShape("pi05", CAMERAS),
    "pi05 of 0.4": PiShape("pi05", {"top": (90, 70), "wrist": (33, 77)}, lerobot="0.4"),
    "pi05 of 0.4, ranges": PiShape(
        "pi05", {"front": (56, 56)}, lerobot="0.4", state=3, ways={"STATE": "MIN_MAX", "ACTION": "MEAN_STD"}
    ),
    "pi05, one camera": PiShape("pi05", {"front": (75, 41)}, state=1, actions=2, layers=3, head_dim=8),
    "pi05, wide state": PiShape(
        "pi05", CAMERAS, state=9, actions=9, policy={"max_state_dim": 4, "num_inference_steps": 10}
    ),
    "pi05, empty camera": PiShape("pi05", CAMERAS, policy={"empty_cameras": 1}, vision_depth=2),
    "pi05, other sizes": PiShape(
        "pi05",
        {"a": (56, 56), "b": (200, 30), "c": (64, 48)},
        hidden=24,
        expert_hidden=40,
        vision_hidden=16,
        patch=7,
        policy={"image_resolution": (42, 42), "min_period": 0.01, "max_period": 2.0, "chunk_size": 9},
    ),
    "pi05, adapter": PiShape("pi05", CAMERAS, adapter=True),
    "pi0": PiShape("pi0", CAMERAS),
    "pi0 of 0.4": PiShape("pi0", {"top": (90, 70), "wrist": (33, 77)}, lerobot="0.4"),
    "pi0 of 0.4, ranges": PiShape(
        "pi0", {"front": (56, 56)}, lerobot="0.4", state=3, ways={"STATE": "MIN_MAX", "ACTION": "QUANTILES"}
    ),
    "pi0, one camera": PiShape("pi0", {"front": (75, 41)}, state=1, actions=2, layers=3, head_dim=8),
    "pi0, full state": PiShape(
        "pi0", CAMERAS, state=7, actions=9, policy={"max_state_dim": 7, "num_inference_steps": 10}
    ),
    "pi0, empty camera": PiShape("pi0", CAMERAS, policy={"empty_cameras": 1}, vision_depth=2),
    "pi0, other sizes": PiShape(
        "pi0",
        {"a": (56, 56), "b": (200, 30), "c": (64, 48)},
        hidden=24,
        expert_hidden=40,
        vision_hidden=16,
        patch=7,
        policy={"image_resolution": (42, 42), "min_period": 0.01, "max_period": 2.0, "chunk_size": 9},
    ),
    "pi0, adapter": PiShape("pi0", CAMERAS, adapter=True),
}  # fmt: skip
