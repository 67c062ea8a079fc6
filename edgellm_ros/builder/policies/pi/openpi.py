# SPDX-License-Identifier: Apache-2.0
"""Reads a pi0 or pi0.5 that openpi saved for PyTorch.

A folder of openpi has weights, sizes and statistics (`assets/*/norm_stats.json`). What openpi's training
configurations have as Python code is in no file: a file `openpi.json` in the folder has to tell it.

Source: openpi, transforms.py, models/tokenizer.py, training/config.py and
examples/convert_jax_model_to_pytorch.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection, read_section
from edgellm_ros.builder.policies.lerobot import IMAGES, STANDARD_FPS
from edgellm_ros.builder.policies.pi.architecture import EXPERT, PiArchitecture
from edgellm_ros.builder.policies.statistics import affine
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.diffusion.policy_config import (
    AffineSpaceConfig,
    PaddedCameraConfig,
    Pi0Config,
    Pi05Config,
    StateConfig,
)

FILE, STATISTICS = "openpi.json", "norm_stats.json"
KEYS = {"cameras", "state", "actions", "discrete_state_input", "relative", "fps", "asset_id"}
EXAMPLE = '{"cameras": {"base_0_rgb": "top"}, "state": ["x", "y"], "actions": ["x", "y"], "fps": 10}'
SLOTS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")  # in the order of the prefix
EPSILON = np.float32(1e-6)  # added to standard deviations and ranges, both ways
PROMPT_TOKENS = {"pi0": 48, "pi05": 200}


def is_adaptive(weights: Weights) -> bool:
    """Tell whether the weights are those of a pi0.5."""
    return any(
        name.removeprefix("model.") == f"{EXPERT}.norm.dense.weight".removeprefix("model.")
        for name in weights
    )


def read_description(checkpoint: Path) -> ConfigSection:
    """Read `openpi.json`.

    ValueError if it is missing or has an unknown key.
    """
    path = checkpoint / FILE
    if not path.is_file():
        raise ValueError(
            f"{path} not found: openpi keeps names of cameras, state and actions in its code: write such a "
            f"file, as in {EXAMPLE} (docs/policies.md)"
        )
    section = read_section(path)
    unknown = sorted(section.data.keys() - KEYS)
    if unknown:
        raise section.fail(unknown[0], f"expected one of {', '.join(sorted(KEYS))}")
    return section


def as_lerobot(config: ConfigSection, description: ConfigSection, adaptive: bool) -> ConfigSection:
    """Return the configuration in LeRobot's form, for the sizes of the graphs."""
    size, kind = config.size("action_dim"), "pi05" if adaptive else "pi0"
    cameras = {f"{IMAGES}{name}": {"type": "VISUAL"} for name in _cameras(description)}
    data = {
        "type": kind,
        "paligemma_variant": config.data.get("paligemma_variant"),
        "action_expert_variant": config.data.get("action_expert_variant"),
        "chunk_size": config.size("action_horizon"),
        "max_state_dim": size,
        "max_action_dim": size,
        "tokenizer_max_length": PROMPT_TOKENS[kind],
        "input_features": cameras,
        "output_features": {},
        "normalization_mapping": {},
    }
    return ConfigSection(data, config.where)


def read_openpi_policy(
    checkpoint: Path,
    description: ConfigSection,
    architecture: PiArchitecture,
    prompt: tuple[tuple[int, ...], tuple[int, ...]],
) -> Pi0Config | Pi05Config:
    """Read the configuration for the runtime.

    prompt: tokens that the tokenizer puts before and after a text.
    """
    statistics = _find_statistics(checkpoint, description)
    adaptive, size = architecture.adaptive, architecture.action_dim
    state, actions = (_names(description, key, size) for key in ("state", "actions"))
    relative = description.data.get("relative", [False] * len(actions))
    if not isinstance(relative, list) or [type(each) for each in relative] != [bool] * len(actions):
        raise description.fail("relative", f"expected a list of {len(actions)} of true or false")
    fps = description.number("fps", STANDARD_FPS)
    if fps <= 0:
        raise description.fail("fps", "expected more than 0")
    spoken = description.flag("discrete_state_input", default=adaptive)
    if spoken and not adaptive:
        raise description.fail("discrete_state_input", "expected false for a pi0")
    common: dict[str, Any] = {
        "cameras": description.make(
            PaddedCameraConfig,
            names=_cameras(description),
            image_size=architecture.tower.image_size,
            tokens=architecture.tower.side**2,
            fill=-1.0,
            centred=True,
            filtered=True,
        ),
        "state": description.make(
            StateConfig, **_feature(statistics, "state", state, adaptive), model_dim=architecture.state_dim
        ),
        "action_space": description.make(
            AffineSpaceConfig,
            **_feature(statistics, "actions", actions, adaptive),
            dt=1 / fps,
            horizon=architecture.horizon,
            relative=tuple(relative),
            model_dim=size,
        ),
        "max_prompt_tokens": PROMPT_TOKENS["pi05" if adaptive else "pi0"],
        "prompt_before": prompt[0],
        "prompt_after": prompt[1],
        "num_denoise_steps": 10,
        "cleaned": True,
    }
    if not adaptive:
        return description.make(Pi0Config, **common)
    return description.make(Pi05Config, **common, prompted_values=len(state) if spoken else 0)


def _cameras(description: ConfigSection) -> tuple[str, ...]:
    """Read the robot's cameras in the order of the model."""
    cameras = description.section("cameras")
    unknown = sorted(cameras.data.keys() - set(SLOTS))
    if unknown or not cameras.data:
        raise description.fail("cameras", f"expected names for some of {', '.join(SLOTS)}")
    return tuple(cameras.text(slot) for slot in SLOTS if slot in cameras.data)


def _names(description: ConfigSection, key: str, most: int) -> tuple[str, ...]:
    names = description.data.get(key)
    if not isinstance(names, list) or not 1 <= len(names) <= most:
        raise description.fail(key, f"expected a list of 1 to {most} names")
    if not all(isinstance(each, str) for each in names):
        raise description.fail(key, "expected a list of names")
    return tuple(names)


def _find_statistics(checkpoint: Path, description: ConfigSection) -> ConfigSection:
    """Read the statistics of the asset that is named, or of the only one."""
    folder = checkpoint / "assets"
    found = {path.parent.relative_to(folder).as_posix(): path for path in sorted(folder.rglob(STATISTICS))}
    if description.has("asset_id"):
        name = description.text("asset_id")
        if name not in found:
            raise description.fail("asset_id", f"expected one of {', '.join(found) or 'none: no statistics'}")
    elif not found:
        raise FileNotFoundError(f"{folder}: no {STATISTICS} in it: openpi saves statistics there")
    elif len(found) == 1:
        name = next(iter(found))
    else:
        raise ValueError(
            f"{description.where}: {folder} has statistics of {', '.join(found)}: name one (asset_id)"
        )
    return read_section(found[name]).section("norm_stats")


def _feature(
    statistics: ConfigSection, key: str, names: tuple[str, ...], adaptive: bool
) -> dict[str, tuple[Any, ...]]:
    """Return names, units and normalisation of the first values of a feature."""
    section, way = statistics.section(key), "QUANTILES" if adaptive else "MEAN_STD"
    wanted = ("q01", "q99") if adaptive else ("mean", "std")
    stats = {name: np.array(section.numbers(name)[: len(names)], np.float64) for name in wanted}
    with np.errstate(over="ignore"):  # `affine` refuses values that are not finite
        rounded = {name: values.astype(np.float32) for name, values in stats.items()}
    offset, scale, shift = affine(rounded, way, len(names), section.where, inverse=True)
    low, high = stats.values()
    scale = ((high - low + EPSILON) / 2 if adaptive else high + EPSILON).astype(np.float32)
    return {
        "names": names,
        "units": ("",) * len(names),
        "offset": tuple(offset.tolist()),
        "scale": tuple(scale.tolist()),
        "shift": tuple(shift.tolist()),
    }
