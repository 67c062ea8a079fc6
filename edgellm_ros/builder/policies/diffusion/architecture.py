# SPDX-License-Identifier: Apache-2.0
"""Sizes of Diffusion Policy: the encoders of its images, and its U-Net."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm_ros.builder.policies.observations import ImageSpace
from edgellm_ros.builder.policies.resnet import ResNet


@dataclass(frozen=True)
class EncoderShape:
    """An encoder: images are resized and cut, and a ResNet finds keypoints in them."""

    resnet: ResNet
    keypoints: int
    resized: tuple[int, int]  # (height, width) in pixels after the resizing
    cut: tuple[int, int]  # after the cut of the middle
    of_each_camera: bool  # whether each camera has an encoder of its own

    @property
    def features(self) -> int:
        """Return the number of values of an image."""
        return 2 * self.keypoints


@dataclass(frozen=True)
class UNetShape:
    """The U-Net over the time of the actions."""

    widths: tuple[int, ...]  # of its levels
    kernel: int  # actions that a convolution sees
    groups: int  # of norms
    time_width: int  # values of the embedding of a step of the sampler
    scales: bool  # whether the condition scales features, besides moving them


@dataclass(frozen=True)
class DiffusionArchitecture:
    """All that the graphs of a Diffusion Policy use."""

    encoder: EncoderShape
    unet: UNetShape
    images: tuple[ImageSpace, ...]  # by camera
    observations: int
    state_dim: int
    environment_dim: int  # of the environment's state; 0 = none
    horizon: int
    action_dim: int
    unet_name: str  # of the U-Net's module; a compiled one has another

    @property
    def condition(self) -> int:
        """Return the number of values of the condition: those of all observations."""
        images = len(self.images) * self.encoder.features
        return self.observations * (self.state_dim + images + self.environment_dim)
