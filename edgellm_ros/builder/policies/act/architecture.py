# SPDX-License-Identifier: Apache-2.0
"""Sizes of ACT: its ResNet, and the layers of its encoder and decoder."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm_ros.builder.policies.observations import ImageSpace
from edgellm_ros.builder.policies.resnet import ResNet


@dataclass(frozen=True)
class ACTArchitecture:
    """All that the graph of an ACT uses."""

    resnet: ResNet
    images: tuple[ImageSpace, ...]  # by camera
    state_dim: int  # 0 = the policy takes no state
    environment_dim: int  # of the environment's state; 0 = none
    hidden_size: int
    num_heads: int
    inner_size: int
    encoder_layers: int
    decoder_layers: int
    norm_first: bool
    gelu: bool  # ReLU otherwise
    horizon: int
    action_dim: int

    @property
    def other_rows(self) -> int:
        """Return the rows of the encoder that are no part of an image."""
        return 1 + bool(self.state_dim) + bool(self.environment_dim)
