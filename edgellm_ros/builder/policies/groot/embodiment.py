# SPDX-License-Identifier: Apache-2.0
"""Reads cameras, state, actions and statistics of one embodiment.

A vector of state or actions is the values of its modality's keys, side by side in the order of the keys.

Sources: NVIDIA Isaac-GR00T, gr00t/data/state_action/state_action_processor.py and gr00t/data/utils.py;
LeRobot 0.6.1, policies/groot/processor_groot.py and utils.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.policies.groot.architecture import GrootArchitecture
from edgellm_ros.builder.policies.lerobot import ACTION, STATE, dataset_fps, dataset_names
from edgellm_ros.diffusion.groot_config import POSE, GrootSpaceConfig, LimitedStateConfig

MOST_FRAMES = 8
LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Embodiment:
    """The sections of one embodiment in a checkpoint's files."""

    tag: str
    number: int  # of its encoders and decoder
    modalities: ConfigSection  # "video", "state", "action"
    statistics: ConfigSection  # "state", "action", "relative_action"
    percentiles: bool  # whether ranges are those of percentiles, but those of relative actions
    relative: bool  # whether actions may be relative to the state
    clips: bool  # whether a normalised state is limited
    sines: bool  # whether a state may become sines and cosines
    exact: bool  # whether only an equal upper and lower end count as equal

    def keys(self, modality: str) -> tuple[str, ...]:
        """Read the keys of a modality, of which there is one at least.

        ValueError for a state of several time steps.
        """
        section = self.modalities.section(modality)
        keys = section.data.get("modality_keys")
        if not isinstance(keys, list) or not keys or not all(isinstance(key, str) and key for key in keys):
            raise section.fail("modality_keys", "expected a list of names")
        steps = section.integers("delta_indices") if section.has("delta_indices") else (0,)
        if modality == "state" and steps != (0,):
            raise section.fail("delta_indices", "supported: [0], the present alone")
        return tuple(keys)

    @property
    def frames(self) -> int:
        """Return the number of images of each camera.

        The last of them is the present one.
        """
        section = self.modalities.section("video")
        steps = section.integers("delta_indices")
        if not 1 <= len(steps) <= MOST_FRAMES or steps[-1] != 0 or sorted({*steps}) != [*steps]:
            raise section.fail("delta_indices", f"supported: up to {MOST_FRAMES} growing numbers, the last 0")
        return len(steps)

    @property
    def horizon(self) -> int:
        """Return the number of actions that count."""
        section = self.modalities.section("action")
        steps = section.integers("delta_indices")
        if not steps or steps != tuple(range(len(steps))):
            raise section.fail("delta_indices", "supported: 0, 1, 2, ...")
        return len(steps)

    def ranges(self, modality: str, key: str, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Read the lower and the upper ends of a key's values, float64 [n] or [steps,n].

        names: of both in `statistics`.
        """
        section = self.statistics.section(modality).section(key)
        low, high = (_values(section, name) for name in names)
        if low.shape != high.shape:
            raise section.fail(names[1], f"expected the shape of {names[0]}, {list(low.shape)}")
        if (high < low).any():
            raise section.fail(names[1], f"has values below those of {names[0]}")
        return low, high


def read_state(
    embodiment: Embodiment, config: ConfigSection, names_of: Path | None, model_dim: int
) -> LimitedStateConfig:
    """Read names and ranges of the state.

    config: to name in errors; names_of: a data set that names the values, or None.
    """
    section = embodiment.modalities.section("state")
    section.one_of("exclude_state", [False], default=False)
    section.one_of("mean_std_embedding_keys", [None, []])
    keys = embodiment.keys("state")
    turned = _angle_keys(section, keys) if embodiment.sines else ()
    names: list[str] = []
    lows, highs, angles = [], [], []
    for key in keys:
        low, high = embodiment.ranges("state", key, _names(embodiment.percentiles))
        if low.ndim != 1:
            raise section.fail("modality_keys", f"statistics of {key} have {low.ndim} dimensions, expected 1")
        if key in turned:
            angles.append((len(names), len(low)))
        names += _value_names(key, len(low))
        lows.append(low)
        highs.append(high)
    low, high = np.concatenate(lows), np.concatenate(highs)
    constant = high == low if embodiment.exact else np.isclose(high, low)
    scale = np.where(constant, 1.0, (high - low) / 2)
    limit = 1.0 if embodiment.clips else LARGEST
    return config.make(
        LimitedStateConfig,
        names=dataset_names(names_of, STATE, len(names)) if names_of is not None else tuple(names),
        units=("",) * len(names),  # not stated
        offset=_floats(low),
        scale=_floats(scale),
        shift=(1.0,) * len(names),
        limits=_floats(np.where(constant, 0.0, limit)),
        angles=tuple(angles),
        model_dim=model_dim,
    )


def _angle_keys(section: ConfigSection, keys: Sequence[str]) -> Sequence[str]:
    """Read the keys of the state that become sines and cosines."""
    turned = section.data.get("sin_cos_embedding_keys") or []
    if not isinstance(turned, list) or not all(key in keys for key in turned):
        raise section.fail("sin_cos_embedding_keys", "expected a list of modality_keys")
    return turned


def read_actions(
    embodiment: Embodiment,
    config: ConfigSection,
    dataset: Path | None,
    names_of: Path | None,
    architecture: GrootArchitecture,
) -> GrootSpaceConfig:
    """Read names and ranges of actions, and what they are relative to.

    dataset: has their rate; names_of: see `read_state`.
    """
    section = embodiment.modalities.section("action")
    section.one_of("mean_std_embedding_keys", [None, []])
    keys, horizon = embodiment.keys("action"), embodiment.horizon
    names: list[str] = []
    lows, highs, references, poses = [], [], [], []
    for key, action in zip(keys, _action_configs(section, len(keys)), strict=True):
        size = embodiment.ranges("action", key, _names(embodiment.percentiles))[0].shape[-1]
        relative = embodiment.relative and _word(action, "rep", ["relative", "absolute"]) == "relative"
        modality = "relative_action" if relative else "action"
        low, high = embodiment.ranges(modality, key, _names(embodiment.percentiles and not relative))
        if low.shape[-1] != size or (low.ndim == 2 and len(low) < horizon):
            found = f"{modality} of {key} has the shape {list(low.shape)}"
            raise section.fail("modality_keys", f"{found}, expected {size} values, of {horizon} steps if any")
        lows.append(np.broadcast_to(low[:horizon] if low.ndim == 2 else low, (horizon, size)))
        highs.append(np.broadcast_to(high[:horizon] if high.ndim == 2 else high, (horizon, size)))
        if relative and _is_pose(action, size):
            poses.append(len(names))
        references += _references(embodiment, action, key, size) if relative else [-1] * size
        names += _value_names(key, size)
    low, high = np.concatenate(lows, axis=1), np.concatenate(highs, axis=1)
    scale, same = (high - low) / 2, bool((low == low[0]).all() and (high == high[0]).all())
    return config.make(
        GrootSpaceConfig,
        names=dataset_names(names_of, ACTION, len(names)) if names_of is not None else tuple(names),
        units=("",) * len(names),
        offset=_floats(low[0]),
        scale=_floats(scale[0]),
        shift=(1.0,) * len(names),
        dt=1 / dataset_fps(dataset),
        horizon=horizon,
        model_dim=architecture.action_dim,
        relative=tuple(each >= 0 for each in references),
        model_horizon=architecture.horizon,
        step_offset=() if same else tuple(map(_floats, low)),
        step_scale=() if same else tuple(map(_floats, scale)),
        references=tuple(references),
        poses=tuple(poses),
    )


def _action_configs(section: ConfigSection, count: int) -> list[ConfigSection]:
    """Read how the actions of each key are represented.

    Without a list they are absolute.
    """
    values = section.data.get("action_configs")
    if values is None:
        return [ConfigSection({"rep": "absolute"}, section.where)] * count
    where = f"{section.where}.action_configs"
    if (
        not isinstance(values, list)
        or len(values) != count
        or not all(isinstance(v, Mapping) for v in values)
    ):
        raise section.fail("action_configs", f"expected {count} objects, one of each of modality_keys")
    return [ConfigSection(value, f"{where}[{i}]") for i, value in enumerate(values)]


def _word(section: ConfigSection, key: str, supported: Sequence[str]) -> str:
    """Read a word in any case, with "_" for "+"."""
    word = section.text(key).lower().replace("+", "_")
    if word not in supported:
        raise section.fail(key, f"supported: {', '.join(supported)}")
    return word


def _is_pose(action: ConfigSection, size: int) -> bool:
    """Tell whether relative actions are poses."""
    if _word(action, "type", ["eef", "non_eef"]) == "non_eef":
        return False
    _word(action, "format", ["xyz_rot6d"])
    if size != POSE:
        raise action.fail("format", f"expected {POSE} values, the statistics have {size}")
    return True


def _references(embodiment: Embodiment, action: ConfigSection, key: str, size: int) -> list[int]:
    """Return the places of the values of the state that relative actions refer to."""
    source = action.text("state_key") if action.has("state_key") else key
    first = 0
    for name in embodiment.keys("state"):
        count = embodiment.ranges("state", name, _names(embodiment.percentiles))[0].shape[-1]
        if name == source:
            if count != size:
                raise action.fail("state_key", f"{source} has {count} values, the actions {key} have {size}")
            return list(range(first, first + size))
        first += count
    raise action.fail(
        "state_key", f"the actions {key} are relative to {source}, which the state does not have"
    )


def _names(percentiles: bool) -> tuple[str, str]:
    return ("q01", "q99") if percentiles else ("min", "max")


def _values(section: ConfigSection, name: str) -> np.ndarray:
    """Read statistics, float64 [n] or [steps,n].

    The file has a list of numbers, or a list of these.
    """
    rows: Any = section.data.get(name)
    nested = isinstance(rows, list) and bool(rows) and all(isinstance(row, list) for row in rows)
    lines = [ConfigSection({name: row}, section.where).numbers(name) for row in (rows if nested else [rows])]
    if not lines[0] or len({len(line) for line in lines}) > 1:
        raise section.fail(name, "expected numbers, or lists of as many numbers")
    values = np.array(lines, np.float64)
    if (np.abs(values) > LARGEST).any():
        raise section.fail(name, f"expected numbers of at most {LARGEST:.3g}")
    return values if nested else values[0]


def _value_names(key: str, size: int) -> list[str]:
    return [key] if size == 1 else [f"{key}_{i}" for i in range(size)]


def _floats(values: np.ndarray) -> tuple[float, ...]:
    """Return values as they are in float32."""
    return tuple(values.astype(np.float32).tolist())
