# SPDX-License-Identifier: Apache-2.0
"""Reads and checks the configuration of an ACT.

The checks cover everything that the graph relies on. Source: LeRobot 0.4.4, configuration_act.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edgellm_ros.builder.checkpoint.checkpoint_config import ConfigSection
from edgellm_ros.builder.policies.act.architecture import ACTArchitecture
from edgellm_ros.builder.policies.lerobot import COMMON_KEYS, MOST_ACTIONS, camera_names, check_keys
from edgellm_ros.builder.policies.observations import VectorReader, read_images, read_sizes
from edgellm_ros.builder.policies.processors import check_steps
from edgellm_ros.builder.policies.resnet import RESNETS, ResNet
from edgellm_ros.builder.weights.claimed_sizes import check_layers
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.diffusion.policy_config import ACTConfig, GridCameraConfig

KEYS = COMMON_KEYS | {
    "chunk_size", "dim_feedforward", "dim_model", "dropout", "feedforward_activation", "kl_weight",
    "latent_dim", "n_action_steps", "n_decoder_layers", "n_encoder_layers", "n_heads",
    "n_vae_encoder_layers", "optimizer_lr", "optimizer_lr_backbone", "optimizer_weight_decay",
    "pre_norm", "pretrained_backbone_weights", "replace_final_stride_with_dilation",
    "temporal_ensemble_coeff", "use_vae", "vision_backbone",
}  # fmt: skip


def read_architecture(checkpoint: Path, config: ConfigSection, weights: Weights) -> ACTArchitecture:
    """Read the sizes of the graph, and the normalisation of images.

    ValueError, which names file, key and value, for a checkpoint that the graph would compute differently.
    """
    config.one_of("n_obs_steps", [1], default=1)
    check_keys(config, KEYS)
    sizes = read_sizes(config)
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
        images=read_images(checkpoint, config, weights),
        state_dim=sizes.state,
        environment_dim=sizes.environment,
        hidden_size=hidden,
        num_heads=heads,
        inner_size=config.size("dim_feedforward", 3200),
        encoder_layers=config.size("n_encoder_layers", 4),
        decoder_layers=config.size("n_decoder_layers", 1),
        norm_first=config.one_of("pre_norm", [False, True], default=False),
        gelu=config.one_of("feedforward_activation", ["relu", "gelu"], default="relu") == "gelu",
        horizon=config.size("chunk_size", 100, MOST_ACTIONS),
        action_dim=sizes.action,
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
    vectors = VectorReader(checkpoint, config, weights, dataset, renamed, read_sizes(config))
    images, grids = architecture.images, architecture.resnet.grid
    return config.make(
        ACTConfig,
        cameras=config.make(
            GridCameraConfig,
            names=camera_names(config, renamed),
            heights=tuple(image.height for image in images),
            widths=tuple(image.width for image in images),
            tokens=tuple(int(np.prod(grids(image.height, image.width))) for image in images),
        ),
        state=vectors.state(),
        action_space=vectors.action_space(architecture.horizon),
        other_rows=architecture.other_rows,
    )
