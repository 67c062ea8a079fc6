# SPDX-License-Identifier: Apache-2.0
"""Configuration of GR00T: what its processors do to images, state and actions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from edgellm_ros.diffusion.policy_config import (
    AffineSpaceConfig,
    FlowPolicyConfig,
    PrefixCameraConfig,
    StateConfig,
)
from edgellm_ros.multimodal.image_crop import ImageCrop
from edgellm_ros.multimodal.vision_config import Qwen3VisionConfig, Siglip2VisionConfig

POSE = 9  # values of a pose: x, y, z, and the first two rows of the rotation's matrix


@dataclass(frozen=True)
class CroppedCameraConfig(PrefixCameraConfig):
    """Cameras whose images are cropped before the vision tower takes them."""

    crop: ImageCrop
    # Images of each camera in the prompt, by time. The present image stands for earlier ones too.
    frames: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.frames < 1:
            raise ValueError(f"frames must be at least 1, got {self.frames}")


@dataclass(frozen=True)
class LimitedStateConfig(StateConfig):
    """The robot's state, whose normalised values are limited.

    Angles become sines and cosines.
    """

    # largest magnitude of each normalised value; 0 for a value that does not vary in the training data
    limits: tuple[float, ...]
    # First value and number of values, of each group that the model takes as the sines and then the cosines
    # of its values, in radians. Groups are in the order of the values.
    angles: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        end = 0
        for group in self.angles:
            if len(group) != 2 or group[0] < end or group[1] < 1 or sum(group) > self.dim:
                raise ValueError(f"angles must be groups of the {self.dim} values, got {self.angles}")
            end = sum(group)
        values = self.dim + sum(count for _, count in self.angles)
        if self.model_dim < values:
            raise ValueError(
                f"model_dim {self.model_dim} is less than the {values} values with sines and cosines"
            )
        if len(self.limits) != self.dim or not all(map(math.isfinite, self.limits)) or min(self.limits) < 0:
            raise ValueError(f"limits must have {self.dim} finite values of at least 0, got {self.limits}")


@dataclass(frozen=True)
class GrootSpaceConfig(AffineSpaceConfig):
    """Physical actions of one embodiment.

    Normalised values are limited to -1 to 1. The model computes `model_horizon` actions, of which the first
    `horizon` count. A value that is relative to the state names the value of the state; poses are composed.
    """

    model_horizon: int
    # offset and scale of each action of a chunk in place of those of all, [horizon][dim]; () = those of all
    step_offset: tuple[tuple[float, ...], ...]
    step_scale: tuple[tuple[float, ...], ...]
    references: tuple[int, ...]  # the value of the state that each relative value refers to; -1 of others
    # First values of poses (x, y, z, two rows of the rotation's matrix) relative to a pose of the state:
    # what is added to the values is the pose itself, after which the difference is turned and moved.
    poses: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model_horizon < self.horizon:
            raise ValueError(f"model_horizon must be at least {self.horizon}, got {self.model_horizon}")
        for name in ("step_offset", "step_scale"):
            rows = getattr(self, name)
            if rows and (len(rows) != self.horizon or any(len(row) != self.dim for row in rows)):
                raise ValueError(f"{name} must have {self.horizon} rows of {self.dim} values")
            if not all(math.isfinite(value) for row in rows for value in row):
                raise ValueError(f"{name} must be finite")
        if bool(self.step_offset) != bool(self.step_scale):
            raise ValueError("step_offset and step_scale belong together")
        if tuple(each >= 0 for each in self.references) != self.relative:
            raise ValueError(f"references must be from 0 for relative values, else -1, got {self.references}")
        for first in self.poses:
            if not 0 <= first <= self.dim - POSE or not all(self.relative[first : first + POSE]):
                raise ValueError(f"a pose has {POSE} relative values, got one from {first} of {self.dim}")

    @property
    def state_places(self) -> tuple[int, ...]:
        return self.references


@dataclass(frozen=True)
class GrootConfig(FlowPolicyConfig):
    """GR00T N1.6 and N1.7: images and text are the context of a diffusion transformer."""

    cameras: CroppedCameraConfig
    state: LimitedStateConfig
    action_space: GrootSpaceConfig
    vision: Qwen3VisionConfig | Siglip2VisionConfig
    images_last: bool  # whether images follow the task
    # of each image: how many tokens of `prompt_before` precede it, or of `prompt_after` with images_last
    image_places: tuple[int, ...]
    task_before: str  # text around the task, up to the nearest special tokens
    task_after: str
    no_task: str  # the task of a request without one
    plain_words: bool  # whether a task is in small letters, without punctuation
    embodiment: str  # whose encoders and decoder the graphs have
    kind: Literal["groot"] = field(default="groot", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        images, tokens = self.images, len(self.prompt_after if self.images_last else self.prompt_before)
        if len(self.image_places) != images or sorted(set(self.image_places)) != list(self.image_places):
            raise ValueError(f"image_places must be {images} growing numbers, got {self.image_places}")
        if not all(0 < place <= tokens for place in self.image_places):
            raise ValueError(f"image_places must be from 1 to {tokens}, got {self.image_places}")

    @property
    def images(self) -> int:
        """Return the number of images of a prompt."""
        return len(self.cameras.names) * self.cameras.frames

    def places(self, tokens: int) -> tuple[int, ...]:
        """Return how many of the `tokens` of a prompt precede each image."""
        first = tokens - len(self.prompt_after) if self.images_last else 0
        return tuple(first + place for place in self.image_places)

    @property
    def max_prefix_rows(self) -> int:
        return self.images * self.cameras.tokens + self.max_prompt_tokens
