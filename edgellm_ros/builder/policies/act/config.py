# SPDX-License-Identifier: Apache-2.0
"""Reads and checks the configuration of an ACT.

The checks cover everything that the graph relies on. Source: LeRobot 0.4.4, configuration_act.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.policies.act.architecture import RESNETS, ACTArchitecture, ImageSpace, ResNet
from edgellm_ros.builder.policies.lerobot import (
    ACTION,
    IMAGES,
    STATE,
    camera_names,
    dataset_fps,
    feature_size,
)
from edgellm_ros.builder.policies.processors import check_steps, relative_actions
from edgellm_ros.builder.policies.statistics import Normalisation
from edgellm_ros.builder.weights.claimed_sizes import check_layers
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.diffusion.policy_config import ACTConfig, AffineSpaceConfig, FixedCameraConfig, StateConfig

ENVIRONMENT = "observation.environment_state"
MOST_VALUES = 4096  # of a state or an action
MOST_PIXELS = 8192  # of an image's side


def read_architecture(checkpoint: Path, config: ConfigSection, weights: Weights) -> ACTArchitecture:
    """Read the sizes of the graph, and the normalisation of images.

    ValueError, which names file, key and value, for a checkpoint that the graph would compute differently.
    """
    _check_supported(config)
    check_layers(config, "n_encoder_layers", weights, "model.encoder.layers", default=4)
    check_layers(config, "n_decoder_layers", weights, "model.decoder.layers", default=1)
    hidden, heads = config.size("dim_model", 512), config.size("n_heads", 8)
    if hidden % heads or hidden % 4:
        raise config.fail("dim_model", f"expected a multiple of 4 and of n_heads {heads}")
    blocks, bottleneck = RESNETS[config.one_of("vision_backbone", sorted(RESNETS), default="resnet18")]
    dilated = bool(config.one_of("replace_final_stride_with_dilation", [False, True, 0, 1], default=False))
    if dilated and not bottleneck:
        expected = "false: torchvision's resnet18 and resnet34 have no dilation"
        raise config.fail("replace_final_stride_with_dilation", f"expected {expected}")
    return ACTArchitecture(
        resnet=ResNet(blocks, bottleneck, dilated),
        images=_read_images(checkpoint, config, weights),
        state_dim=_optional_size(config, STATE),
        environment_dim=_optional_size(config, ENVIRONMENT),
        hidden_size=hidden,
        num_heads=heads,
        inner_size=config.size("dim_feedforward", 3200),
        encoder_layers=config.size("n_encoder_layers", 4),
        decoder_layers=config.size("n_decoder_layers", 1),
        norm_first=config.one_of("pre_norm", [False, True], default=False),
        gelu=config.one_of("feedforward_activation", ["relu", "gelu"], default="relu") == "gelu",
        horizon=config.size("chunk_size", 100),
        action_dim=feature_size(config, "output_features", ACTION, MOST_VALUES),
    )


def read_policy(
    checkpoint: Path,
    config: ConfigSection,
    architecture: ACTArchitecture,
    weights: Weights,
    dataset: Path | None,
) -> ACTConfig:
    """Read the configuration for the runtime."""
    renamed = check_steps(checkpoint, config)
    normalisation = Normalisation(checkpoint, config, weights, dataset)

    sizes = ((STATE, architecture.state_dim), (ENVIRONMENT, architecture.environment_dim))
    states = [normalisation.vector(*each, renamed) for each in sizes if each[1]]
    state = None
    if states:
        joined = {name: sum((each[name] for each in states), ()) for name in states[0]}
        state = config.make(StateConfig, **joined, model_dim=len(joined["names"]))
    images, grids = architecture.images, architecture.resnet.grid
    return config.make(
        ACTConfig,
        cameras=config.make(
            FixedCameraConfig,
            names=camera_names(config, renamed),
            heights=tuple(image.height for image in images),
            widths=tuple(image.width for image in images),
            tokens=tuple(int(np.prod(grids(image.height, image.width))) for image in images),
        ),
        state=state,
        action_space=config.make(
            AffineSpaceConfig,
            **normalisation.vector(ACTION, architecture.action_dim, renamed),
            dt=1 / dataset_fps(dataset),
            horizon=architecture.horizon,
            model_dim=architecture.action_dim,
            relative=relative_actions(checkpoint, architecture.action_dim),
        ),
        other_rows=architecture.other_rows,
    )


def _check_supported(config: ConfigSection) -> None:
    """Raise ValueError for an option of LeRobot that the graph does not support."""
    config.one_of("n_obs_steps", [1], default=1)
    features = config.section("input_features")
    supported = {STATE: "STATE", ENVIRONMENT: "ENV"}
    for key in features.data:
        kind = features.section(key).one_of("type", ["VISUAL", "STATE", "ENV"])
        if kind != "VISUAL" and supported.get(key) != kind:
            raise features.fail(key, f"supported besides cameras: {', '.join(supported)}")


def _optional_size(config: ConfigSection, key: str) -> int:
    """Read the number of values of an observation; 0 if the policy does not take it."""
    if not config.section("input_features").has(key):
        return 0
    return feature_size(config, "input_features", key, MOST_VALUES)


def _read_images(checkpoint: Path, config: ConfigSection, weights: Weights) -> tuple[ImageSpace, ...]:
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
