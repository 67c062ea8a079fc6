# SPDX-License-Identifier: Apache-2.0
"""Reads what all policies of LeRobot have in common.

That is features, and names and rate of a data set.

Source: LeRobot 0.4.4, configs/policies.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection, read_section

STATE, ACTION, IMAGES = "observation.state", "action", "observation.images."
ENVIRONMENT = "observation.environment_state"
VECTORS = {STATE: "STATE", ENVIRONMENT: "ENV", ACTION: "ACTION"}  # types of vectors, which select statistics
STANDARD_FPS = 30.0  # of LeRobot's recordings
KINDS = ("VISUAL", "STATE", "ENV", "ACTION", "REWARD", "LANGUAGE")  # of features
MOST_ACTIONS = 4096  # of a chunk
MOST_STEPS = 1000  # from noise
MOST_PIXELS = 8192  # of an image's side
# Keys that config.json of any policy has, of LeRobot 0.3 to 0.6.
COMMON_KEYS = frozenset((
    "type", "n_obs_steps", "input_features", "output_features", "normalization_mapping", "device",
    "use_amp", "use_peft", "push_to_hub", "repo_id", "private", "tags", "license", "pretrained_path",
    "pretrained_revision",
))  # fmt: skip


def check_keys(section: ConfigSection, known: Collection[str]) -> None:
    """Raise ValueError for a key that LeRobot does not have.

    Null and false are no error. LeRobot refuses such a key too: a newer version may compute other actions by
    it.
    """
    for key, value in section.data.items():
        if key not in known and value is not None and value is not False:
            raise section.fail(key, "not a key of LeRobot 0.3 to 0.6, and actions may depend on it")


def check_features(config: ConfigSection) -> None:
    """Raise ValueError for a feature or a normalisation of none of LeRobot's types.

    Vectors must have their own: the type of a feature selects its statistics.
    """
    check_keys(config.section("normalization_mapping"), KINDS)
    for features in map(config.section, ("input_features", "output_features")):
        for key in features.data:
            features.section(key).one_of("type", [VECTORS[key]] if key in VECTORS else KINDS)


def camera_names(config: ConfigSection, renamed: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Read the cameras in the order of `input_features`.

    The name of observation.images.top is top. Cameras of `empty_cameras`, which never have an image, are left
    out. renamed: the policy's name of an observation -> the robot's, which counts. ValueError if there is no
    camera.
    """
    features = config.section("input_features")
    keys = [key for key in features.data if features.section(key).text("type") == "VISUAL"]
    count, sources = config.integer("empty_cameras", 0), renamed or {}
    if count < 0:
        raise config.fail("empty_cameras", "expected at least 0")
    empty = {f"{IMAGES}empty_camera_{i}" for i in range(min(count, len(keys)))}
    names = tuple(sources.get(key, key).removeprefix(IMAGES) for key in keys if key not in empty)
    if not names:
        raise features.fail(f"{IMAGES}...", "expected at least one camera (type VISUAL)")
    return names


def feature_size(config: ConfigSection, section: str, key: str, most: int) -> int:
    """Read the number of values of a vector of VECTORS, at most `most`."""
    feature = config.section(section).section(key)
    feature.one_of("type", [VECTORS[key]])
    shape = feature.integers("shape")
    if len(shape) != 1 or not 1 <= shape[0] <= most:
        raise feature.fail("shape", f"expected [n], n from 1 to {most}")
    return shape[0]


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
