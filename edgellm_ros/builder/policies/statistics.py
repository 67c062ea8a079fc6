# SPDX-License-Identifier: Apache-2.0
"""Reads how LeRobot normalises observations and actions.

Statistics are those that were saved with the policy: of its processors, or before LeRobot 0.4 buffers of its
weights. Statistics of a data set count only where the policy has none, since they may differ from those that
the policy was trained with.

Sources: LeRobot 0.3.3, policies/normalize.py; 0.4.4 and 0.6.1, processor/normalize_processor.py.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection, read_section
from edgellm_ros.builder.checkpoint.safetensors_file import FLOATS, read_header
from edgellm_ros.builder.policies.lerobot import ACTION, dataset_names
from edgellm_ros.builder.policies.processors import EPSILON, read_normaliser
from edgellm_ros.builder.weights.weights import Weights

RANGES = {"MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90")}
NEEDED = {"MEAN_STD": ("mean", "std"), **RANGES}
STATISTICS = frozenset(name for names in NEEDED.values() for name in names)

Stats = Mapping[str, np.ndarray]  # of one feature: mean, std, min, ... -> values [n] float32

logger = logging.getLogger(__name__)


class Affine(NamedTuple):
    """A normalisation: physical = (normalised + shift) * scale + offset."""

    offset: np.ndarray  # [n] float32
    scale: np.ndarray  # [n] float32
    shift: np.ndarray  # [n] float32: 1 for ranges, whose offset is the lower end, else 0


@dataclass(frozen=True)
class Normalisation:
    """Reads the normalisation of a checkpoint's features.

    dataset: the folder `meta` of a LeRobot data set, or None.
    """

    checkpoint: Path
    config: ConfigSection
    weights: Weights
    dataset: Path | None

    def affine(self, key: str, size: int, source: str = "") -> Affine:
        """Read the normalisation of a feature with `size` values.

        An image has a value for each channel. source: the feature's name in the data set, if it is another.
        ValueError, which names file, feature and statistic, for statistics that are missing or unusable.
        """
        features = self.config.section("output_features" if key == ACTION else "input_features")
        way = normalization(self.config, features.section(key).text("type"))
        if way == "IDENTITY":
            return affine({}, way, size, "", inverse=False)
        step = read_normaliser(self.checkpoint, key)
        if step is not None and not step.covers(key):
            return affine({}, "IDENTITY", size, "", inverse=False)
        stats, where = self._stats(key, source or key)
        epsilon = EPSILON if step is None else step.epsilon
        return affine(stats, way, size, f"{where}: {key}", inverse=key == ACTION, epsilon=epsilon)

    def vector(self, key: str, size: int, renamed: Mapping[str, str]) -> dict[str, tuple]:
        """Read names, units and normalisation of a feature's `size` values.

        Returns the arguments of a `FeatureConfig`. renamed: as of `check_steps`. Raises the errors of
        `affine`.
        """
        source = renamed.get(key, key) if key != ACTION else key  # LeRobot renames observations only
        offset, scale, shift = (tuple(each.tolist()) for each in self.affine(key, size, source))
        return {
            "names": dataset_names(self.dataset, source, size),
            "units": ("",) * size,  # LeRobot records none
            "offset": offset,
            "scale": scale,
            "shift": shift,
        }

    def _stats(self, key: str, source: str) -> tuple[Stats, str]:
        """Read the statistics of a feature, and where they are."""
        saved, where = self._saved(key)
        path = None if self.dataset is None else self.dataset / "stats.json"
        given: Stats = {}
        if path is not None and path.is_file():
            section = read_section(path)
            if section.has(source):
                given = _of_dataset(section.section(source))
        if saved:
            if any(name in given and not np.array_equal(given[name], saved[name]) for name in saved):
                logger.warning("%s: other statistics of %s than %s, which count", path, source, where)
            return saved, where
        if given:
            return given, str(path)
        places = f"{where} or {path}" if path is not None else where
        raise ValueError(
            f"{self.checkpoint}: no statistics of {key} in {places}: name the folder meta of the data set "
            "that the policy was trained with (--dataset)"
        )

    def _saved(self, key: str) -> tuple[Stats, str]:
        """Read the statistics that are saved with the policy, and their place.

        {} if there are none.
        """
        step = read_normaliser(self.checkpoint, key)
        if step is None:
            prefix = f"{self._buffer(key)}."
            names = [name for name in STATISTICS if prefix + name in self.weights]
            read = {name: _values(self.weights.read(prefix + name)) for name in names}
            return read, f"{self.weights.where} ({prefix}*)"
        if step.state_file is None:
            return {}, str(step.file)
        stats = {}
        for name, tensor in read_header(step.state_file).items():
            feature, _, statistic = name.rpartition(".")
            if feature != key or statistic not in STATISTICS:
                continue
            if tensor.dtype not in FLOATS:
                supported = ", ".join(FLOATS)
                found = f"tensor {name!r} has dtype {tensor.dtype}; supported: {supported}"
                raise ValueError(f"{step.state_file}: {found}")
            stats[statistic] = _values(tensor.read())
        return stats, str(step.state_file)

    def _buffer(self, key: str) -> str:
        """Return the name of a feature's buffers before LeRobot 0.4.

        Underscores replace the dots of the feature's name. ValueError if another feature has the same one.
        """
        features = self.config.section("output_features" if key == ACTION else "input_features")
        name = key.replace(".", "_")
        same = [each for each in features.data if each.replace(".", "_") == name]
        if len(same) > 1:
            raise features.fail(same[1], f"buffers of the same name as those of {same[0]}")
        return f"{'unnormalize_outputs' if key == ACTION else 'normalize_inputs'}.buffer_{name}"


def normalization(config: ConfigSection, kind: str) -> str:
    """Read how features of a kind ("STATE", "ACTION") are normalised."""
    mapping = config.section("normalization_mapping")
    return mapping.one_of(kind, ["MEAN_STD", "IDENTITY", *RANGES], default="IDENTITY")


def affine(
    stats: Stats, kind: str, size: int, where: str, *, inverse: bool, epsilon: float = EPSILON
) -> Affine:
    """Compute the normalisation of `size` values as LeRobot does.

    inverse: for the way from normalised to physical values, on which a standard deviation is taken as it is.
    epsilon: see `Normaliser`.
    """
    zeros = np.zeros(size, np.float32)
    if kind == "IDENTITY":
        return Affine(zeros, zeros + 1, zeros)
    for name in NEEDED[kind]:
        if name not in stats or stats[name].shape != (size,):
            found = "none" if name not in stats else str(list(stats[name].shape))
            raise ValueError(f"{where}: {kind} needs {name} of {size} values, found {found}")
        if not np.isfinite(stats[name]).all():
            raise ValueError(f"{where}: {name} has values that are not finite")
    low, high = (stats[name] for name in NEEDED[kind])
    if kind == "MEAN_STD":
        if (high < 0).any():
            raise ValueError(f"{where}: std has values below 0")
        return Affine(low, high if inverse else high + np.float32(epsilon), zeros)
    if (high < low).any():
        raise ValueError(f"{where}: {NEEDED[kind][1]} has values below those of {NEEDED[kind][0]}")
    return Affine(low, np.where(high == low, np.float32(epsilon), high - low) / np.float32(2), zeros + 1)


def _of_dataset(section: ConfigSection) -> Stats:
    """Read the statistics of a feature in `stats.json`.

    Those of images are [[[value]], ...].
    """
    stats = {}
    for name in sorted(STATISTICS.intersection(section.data)):
        values: Any = section.data[name]
        while (
            isinstance(values, list) and values and all(isinstance(v, list) and len(v) == 1 for v in values)
        ):
            values = [each[0] for each in values]
        stats[name] = np.array(ConfigSection({name: values}, section.where).numbers(name), np.float32)
    return stats


def _values(array: np.ndarray) -> np.ndarray:
    """Return statistics as [n] float32; those of images are [n, 1, 1]."""
    flat = array.ndim == 3 and array.shape[1:] == (1, 1)
    return (array.reshape(-1) if flat else array).astype(np.float32)
