# SPDX-License-Identifier: Apache-2.0
"""Reads what all policies of LeRobot have in common.

That is features, statistics, and names of a data set.

Source: LeRobot 0.4.4, configs/policies.py and processor/normalize_processor.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection, read_section
from edgellm_ros.builder.policies.processors import (
    EPSILON,
    NORMALIZER,
    POSTPROCESSOR,
    PREPROCESSOR,
    UNNORMALIZER,
    state_file,
)
from edgellm_ros.builder.weights.weights import Weights

STATE, ACTION, IMAGES = "observation.state", "action", "observation.images."
STANDARD_FPS = 30.0  # of LeRobot's recordings
RANGES = {"MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90")}

Stats = Mapping[str, np.ndarray]  # of one feature: mean, std, min, ... -> values


def camera_names(config: ConfigSection, renamed: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Read the cameras in the order of `input_features`.

    The name of observation.images.top is top. Cameras of `empty_cameras`, which never have an image, are left
    out. renamed: the policy's name of an observation -> the robot's, which counts. ValueError if there is no
    camera.
    """
    features = config.section("input_features")
    keys = [key for key in features.data if features.section(key).text("type") == "VISUAL"]
    empty = tuple(f"{IMAGES}empty_camera_{i}" for i in range(config.integer("empty_cameras", 0)))
    sources = renamed or {}
    names = tuple(sources.get(key, key).removeprefix(IMAGES) for key in keys if key not in empty)
    if not names:
        raise features.fail(f"{IMAGES}...", "expected at least one camera (type VISUAL)")
    return names


def feature_size(config: ConfigSection, section: str, key: str, most: int) -> int:
    """Read the number of values of a vector, at most `most`."""
    feature = config.section(section).section(key)
    shape = feature.integers("shape")
    if len(shape) != 1 or not 1 <= shape[0] <= most:
        raise feature.fail("shape", f"expected [n], n from 1 to {most}")
    return shape[0]


def normalization(config: ConfigSection, kind: str) -> str:
    """Read how features of a kind ("STATE", "ACTION") are normalised."""
    mapping = config.section("normalization_mapping")
    return mapping.one_of(kind, ["MEAN_STD", "IDENTITY", *RANGES], default="IDENTITY")


def read_stats(
    checkpoint: Path, weights: Weights, key: str, dataset: Path | None, source: str
) -> tuple[Stats, str]:
    """Read the statistics of a feature, and where they are.

    source: the feature's name in the data set.

    The first source that has them counts: `dataset`, the folder `meta` of a LeRobot data set; the processor
    that LeRobot saves beside the policy; buffers of the policy, which LeRobot saved before 0.4. ValueError if
    none has.
    """
    places = []
    if dataset is not None:
        path = dataset / "stats.json"
        places.append(str(path))
        if path.is_file():
            section = read_section(path)
            if section.has(source):
                stats = section.section(source)
                names = [name for name in stats.data if isinstance(stats.data[name], list)]
                return {name: np.array(stats.numbers(name), np.float32) for name in names}, str(path)
    processor, step = (POSTPROCESSOR, UNNORMALIZER) if key == ACTION else (PREPROCESSOR, NORMALIZER)
    places.append(str(checkpoint / processor))
    state = state_file(checkpoint, processor, step)
    if state is not None:
        stats_of_key = _with_prefix(_load(state), f"{key}.")
        if stats_of_key:
            return stats_of_key, str(state)
    buffers = "unnormalize_outputs" if key == ACTION else "normalize_inputs"
    prefix = f"{buffers}.buffer_{key.replace('.', '_')}."
    names = [name.removeprefix(prefix) for name in weights if name.startswith(prefix)]
    if names:
        return {name: weights.read(prefix + name).astype(np.float32) for name in names}, str(weights.where)
    places.append(f"{weights.where} ({prefix}*)")
    raise ValueError(
        f"{checkpoint}: no statistics of {key} in {', '.join(places)}: name the folder meta of the data set "
        "that the policy was trained with (--dataset)"
    )


def affine(stats: Stats, kind: str, size: int, where: str, inverse: bool) -> tuple[np.ndarray, np.ndarray]:
    """Compute offset and scale of a feature: physical = normalised * scale + offset.

    inverse: for the way from normalised to physical values, on which a standard deviation is taken as it is.
    """
    if kind == "IDENTITY":
        return np.zeros(size, np.float32), np.ones(size, np.float32)
    needed = ("mean", "std") if kind == "MEAN_STD" else RANGES[kind]
    for name in needed:
        if name not in stats or stats[name].shape != (size,):
            found = "none" if name not in stats else str(list(stats[name].shape))
            raise ValueError(f"{where}: {kind} needs {name} of {size} values, found {found}")
    low, high = (stats[name].astype(np.float32) for name in needed)
    if not np.isfinite([low, high]).all():
        raise ValueError(f"{where}: {', '.join(needed)} have values that are not finite")
    if kind == "MEAN_STD":
        return low, high if inverse else high + np.float32(EPSILON)
    size_of_range = np.where(high == low, np.float32(EPSILON), high - low)
    return low + size_of_range / 2, size_of_range / 2


def dataset_names(dataset: Path | None, key: str, size: int) -> tuple[str, ...]:
    """Read the names of a vector's values from `info.json` of a data set.

    Without a data set, or if it does not tell, values are named state_0, state_1, ... or action_0, ...
    """
    names = None
    if dataset is not None:
        features = read_section(dataset / "info.json").section("features")
        if features.has(key):
            feature = features.section(key)
            names = feature.data.get("names")
            if isinstance(names, Mapping):  # older data sets: {"motors": [...]}
                names = next(iter(names.values()), None)
            if names is not None and not _is_list_of_text(names, size):
                raise feature.fail("names", f"expected a list of {size} names")
    return tuple(names) if names else tuple(f"{key.rpartition('.')[2]}_{i}" for i in range(size))


def dataset_fps(dataset: Path | None) -> float:
    """Read the actions per second from `info.json` of a data set.

    Without a data set, the rate is that of LeRobot's recordings.
    """
    if dataset is None:
        return STANDARD_FPS
    info = read_section(dataset / "info.json")
    fps = info.number("fps")
    if fps <= 0:
        raise info.fail("fps", "expected more than 0")
    return fps


def _is_list_of_text(value: object, size: int) -> bool:
    return isinstance(value, list) and len(value) == size and all(isinstance(each, str) for each in value)


def _load(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} not found")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a readable safetensors file: {error}") from None


def _with_prefix(tensors: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
