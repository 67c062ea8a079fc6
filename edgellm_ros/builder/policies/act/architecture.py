# SPDX-License-Identifier: Apache-2.0
"""Sizes of ACT: its ResNet, and the layers of its encoder and decoder."""

from __future__ import annotations

from dataclasses import dataclass

# Blocks of the four stages of torchvision's ResNets, and whether a block is a bottleneck.
RESNETS = {
    "resnet18": ((2, 2, 2, 2), False),
    "resnet34": ((3, 4, 6, 3), False),
    "resnet50": ((3, 4, 6, 3), True),
}
WIDTHS = (64, 128, 256, 512)  # of a stage's 3 x 3 convolutions
EXPANSION = 4  # of a bottleneck's last convolution


@dataclass(frozen=True)
class ResNet:
    """A backbone; `dilated`: its last stage has dilation in place of a stride."""

    blocks: tuple[int, ...]
    bottleneck: bool
    dilated: bool

    @property
    def channels(self) -> int:
        """Return the number of values of a place of the last stage."""
        return WIDTHS[-1] * (EXPANSION if self.bottleneck else 1)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of the last stage for an image of this size in pixels."""
        halvings = 4 if self.dilated else 5
        for _ in range(halvings):  # of convolutions and a pool, whose padding keeps the border
            height, width = (height + 1) // 2, (width + 1) // 2
        return height, width


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
