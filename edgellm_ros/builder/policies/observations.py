# SPDX-License-Identifier: Apache-2.0
"""Reads the observations of policies whose images keep the size of the training.

Such policies are ACT and Diffusion Policy. Source: LeRobot 0.4.4, configs/policies.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.policies.lerobot import (
    ACTION,
    ENVIRONMENT,
    IMAGES,
    MOST_PIXELS,
    STATE,
    check_features,
    dataset_fps,
    feature_size,
)
from edgellm_ros.builder.policies.processors import relative_actions
from edgellm_ros.builder.policies.statistics import Normalisation
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.diffusion.policy_config import AffineSpaceConfig, StateConfig

MOST_VALUES = 4096  # of a state or an action


@dataclass(frozen=True)
class ImageSpace:
    """A camera's images, and what a channel's values become.

    A value from 0 to 255 becomes `value * scale + offset`.
    """

    height: int
    width: int
    scale: tuple[float, ...]
    offset: tuple[float, ...]


@dataclass(frozen=True)
class Vectors:
    """Sizes of a policy's vectors; 0 = the policy does not take it."""

    state: int
    environment: int  # state of the environment
    action: int


def read_sizes(config: ConfigSection) -> Vectors:
    """Read the sizes of vectors. ValueError for an observation of another kind."""
    check_features(config)
    features = config.section("input_features")
    for key in features.data:  # LeRobot leaves out other states, such as efforts
        if (features.section(key).text("type") == "ENV") != (key == ENVIRONMENT):
            raise features.fail(key, f"expected the type ENV for {ENVIRONMENT}, and for no other observation")
    state, environment = (
        feature_size(config, "input_features", key, MOST_VALUES) if features.has(key) else 0
        for key in (STATE, ENVIRONMENT)
    )
    return Vectors(state, environment, feature_size(config, "output_features", ACTION, MOST_VALUES))


def read_images(checkpoint: Path, config: ConfigSection, weights: Weights) -> tuple[ImageSpace, ...]:
    """Read size and normalisation of each camera's images.

    The statistics are those that LeRobot saved with the policy: they may be those of ImageNet, which a data
    set does not have.
    """
    features, images = config.section("input_features"), []
    normalisation = Normalisation(checkpoint, config, weights, None)
    for key in (key for key in features.data if features.section(key).text("type") == "VISUAL"):
        feature = features.section(key)
        shape = feature.integers("shape")
        if len(shape) != 3 or shape[0] != 3 or not all(1 <= size <= MOST_PIXELS for size in shape[1:]):
            raise feature.fail("shape", f"expected [3, height, width], sizes from 1 to {MOST_PIXELS}")
        affine = normalisation.affine(key, 3)
        scale, offset = 1 / (255 * affine.scale), -affine.offset / affine.scale - affine.shift
        images.append(ImageSpace(shape[1], shape[2], tuple(scale.tolist()), tuple(offset.tolist())))
    if not images:
        raise features.fail(f"{IMAGES}...", "expected at least one camera (type VISUAL)")
    return tuple(images)


@dataclass(frozen=True)
class VectorReader:
    """Reads names and statistics of a policy's vectors.

    renamed: the policy's name of an observation -> the robot's; dataset: as of `PolicySources`.
    """

    checkpoint: Path
    config: ConfigSection
    weights: Weights
    dataset: Path | None
    renamed: Mapping[str, str]
    sizes: Vectors

    def state(self) -> StateConfig | None:
        """Read the robot's state, then the environment's; None if there is neither."""
        sizes = ((STATE, self.sizes.state), (ENVIRONMENT, self.sizes.environment))
        states = [self._feature(*each) for each in sizes if each[1]]
        if not states:
            return None
        joined = {name: sum((each[name] for each in states), ()) for name in states[0]}
        return self.config.make(StateConfig, **joined, model_dim=len(joined["names"]))

    def action_space(self, horizon: int) -> AffineSpaceConfig:
        """Read the actions, of which a chunk has `horizon`."""
        size = self.sizes.action
        return self.config.make(
            AffineSpaceConfig,
            **self._feature(ACTION, size),
            dt=1 / dataset_fps(self.dataset),
            horizon=horizon,
            model_dim=size,
            relative=relative_actions(self.checkpoint, size),
        )

    def _feature(self, key: str, size: int) -> dict[str, tuple]:
        """Read names, units and statistics of a vector of `size` values."""
        normalisation = Normalisation(self.checkpoint, self.config, self.weights, self.dataset)
        return normalisation.vector(key, size, self.renamed)
