# SPDX-License-Identifier: Apache-2.0
"""Sizes of X-VLA.

The sizes are those of Florence-2's vision tower and text encoder, and of the transformer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

VLM, HEAD = "model.vlm", "model.transformer"
TOWER, PROJECTOR = f"{VLM}.vision_tower", f"{VLM}.multi_modal_projector"
ENCODER = f"{VLM}.language_model.encoder"
EMBEDDING = f"{ENCODER}.embed_tokens.weight"
EPSILON = 1e-5  # of every LayerNorm


@dataclass(frozen=True)
class Stage:
    """A stage of the vision tower: a convolution, and blocks on its places."""

    size: int  # values of a place
    depth: int  # blocks
    heads: int  # of the attention among the places of a window
    groups: int  # of the attention among values
    kernel: int
    stride: int
    padding: int
    norm_first: bool  # whether a norm is before the convolution, or behind it

    def side(self, side: int) -> int:
        """Return the places of a side, of so many before the convolution."""
        return (side + 2 * self.padding - self.kernel) // self.stride + 1


@dataclass(frozen=True)
class DaViT:
    """Florence-2's vision tower for square images of one size."""

    stages: tuple[Stage, ...]
    window: int  # places of a side
    positions: int  # of the learned rows and columns
    times: int  # positions of images in time, of which the first one is used
    image_size: int  # pixels of a side
    transposed: bool  # whether the checkpoint has the last projection as [in, out]

    @property
    def side(self) -> int:
        """Return the places of a side of the last stage."""
        side = self.image_size
        for stage in self.stages:
            side = stage.side(side)
        return side

    @property
    def tokens(self) -> int:
        """Return the rows that an image becomes: their mean, and the places."""
        return 1 + self.side**2


@dataclass(frozen=True)
class TextEncoder:
    """BART's encoder."""

    hidden_size: int
    layers: int
    heads: int
    inner_size: int
    vocab_size: int
    positions: int
    pad_token: int


@dataclass(frozen=True)
class ActionMode:
    """What the values of the model's actions are."""

    size: int  # values of an action; 0 = `max_action_dim`
    actions: int  # the first ones, which a robot takes; 0 = those of the feature "action"
    grippers: tuple[int, ...] = ()  # unseen by the model, and made from 0 to 1 of what it predicts
    states: int = 0  # `max_state_dim`, if it must be this one


MODES: Mapping[str, ActionMode] = {
    "ee6d": ActionMode(20, 20, (9, 19)),
    "joint": ActionMode(14, 14, (6, 13)),
    "agibot_ee6d": ActionMode(20, 20),
    "franka_joint7": ActionMode(20, 7),
    "so101_bimanual": ActionMode(20, 12, (5, 11), states=20),
    "auto": ActionMode(0, 0),
}


@dataclass(frozen=True)
class XVLAArchitecture:
    """All that the graphs of an X-VLA use."""

    tower: DaViT
    text: TextEncoder
    views: int  # images that the transformer has rows of; rows of missing ones are zeros
    max_tokens: int  # of a task, which is filled up to them
    hidden_size: int
    depth: int
    heads: int
    inner_size: int
    domains: int
    domain: int  # whose weights and soft prompts the graphs have
    soft_prompts: int
    time_size: int
    positions: int
    own_projections: bool  # whether each domain has its own projections of the prefix
    action_dim: int
    state_dim: int
    grippers: tuple[int, ...]
    horizon: int

    @property
    def encoder_rows(self) -> int:
        """Return the rows of the text encoder: those of the first image, and of the task."""
        return self.tower.tokens + self.max_tokens

    @property
    def prefix_rows(self) -> int:
        """Return the rows of images and task."""
        return self.views * self.tower.tokens + self.max_tokens
