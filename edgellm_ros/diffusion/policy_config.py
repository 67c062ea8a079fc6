# SPDX-License-Identifier: Apache-2.0
"""Configurations of policies: models that answer a request with actions only.

A policy with a flow (`FlowPolicyConfig`) has a prefix engine, which computes a context of camera images, a
task in words and the robot's state, and an action engine, which computes velocities from noise to actions and
reads the context. X-VLA has the same two engines, but predicts the clean actions. So has Diffusion Policy,
without a task; its action engine predicts noise. ACT has one engine, from images and state to actions. To add
a policy, add a class, here or in its own file, and what runs it in `runtime/policy/pipeline.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

TARGET, MODEL_TARGET = 7, 10  # values of a target of the arm's tip, and of the model's


@dataclass(frozen=True)
class FeatureConfig:
    """Names, units and statistics of the values of a vector.

    A physical value is `(normalised + shift) * scale + offset`. All tuples have one entry per value.
    """

    names: tuple[str, ...]
    units: tuple[str, ...]  # "" = unknown
    offset: tuple[float, ...]
    scale: tuple[float, ...]
    # 1 where the normalised range is -1 to 1 and offset its lower end, else 0: with a range near 0, an offset
    # in its middle would be the lower end in fp32
    shift: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.names or len(set(self.names)) != len(self.names):
            raise ValueError(f"names must be different and at least one, got {self.names}")
        for name in ("units", "offset", "scale", "shift"):
            if len(getattr(self, name)) != len(self.names):
                raise ValueError(f"{name} must have {len(self.names)} values, got {getattr(self, name)}")
        if not all(map(math.isfinite, (*self.offset, *self.scale))):
            raise ValueError(f"offset and scale must be finite, got {self.offset} and {self.scale}")
        if not {0.0, 1.0}.issuperset(self.shift):
            raise ValueError(f"shift must be 0 or 1, got {self.shift}")

    @property
    def dim(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class StateConfig(FeatureConfig):
    """The robot's state.

    The model takes it as `(value - offset) / scale - shift`, filled up with zeros.
    """

    model_dim: int  # values that the model takes

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.scale) <= 0:
            raise ValueError(f"scale must be positive, got {self.scale}")
        _check_model_dim(self.model_dim, self.dim)


@dataclass(frozen=True)
class AffineSpaceConfig(FeatureConfig):
    """Physical actions, which are the first values of the model's actions."""

    dt: float  # seconds per action
    horizon: int  # actions of a chunk
    model_dim: int  # values of an action of the model
    # whether the model's value is relative to the value of the state at the same place, when the plan is made
    relative: tuple[bool, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.dt < math.inf or self.horizon < 1:
            raise ValueError(
                f"dt must be positive and horizon at least 1, got dt={self.dt}, horizon={self.horizon}"
            )
        _check_model_dim(self.model_dim, self.dim)
        if len(self.relative) != self.dim:
            raise ValueError(f"relative must have {self.dim} values, got {self.relative}")

    @property
    def state_places(self) -> tuple[int, ...]:
        """Return the value of the state that each value is relative to; -1 of others."""
        return tuple(i if own else -1 for i, own in enumerate(self.relative))


@dataclass(frozen=True)
class TipSpaceConfig(AffineSpaceConfig):
    """Physical actions of X-VLA, which may be a target of the arm's tip.

    A target is the first 10 values of the model's actions: the point, two columns of the rotation's matrix,
    and the gripper. It becomes 7 values: the point, the rotation's axis times its angle in rad, and 1 or -1
    for a gripper value above 0.5 or not.
    """

    is_target: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_target and (self.dim != TARGET or self.model_dim < MODEL_TARGET):
            raise ValueError(
                f"a target has {TARGET} values of at least {MODEL_TARGET} of the model, got {self.dim} of "
                f"{self.model_dim}"
            )


@dataclass(frozen=True)
class CameraConfig:
    """The cameras of a policy."""

    names: tuple[str, ...]  # in the order in which the model takes them

    def __post_init__(self) -> None:
        if not self.names or len(set(self.names)) != len(self.names):
            raise ValueError(f"names must be different and at least one, got {self.names}")
        if "" in self.names:
            raise ValueError(f"names must not be empty, got {self.names}")


@dataclass(frozen=True)
class PrefixCameraConfig(CameraConfig):
    """Cameras whose images become rows of a prefix."""

    tokens: int  # rows of an image in the prefix, the most if images of several sizes have different numbers

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens < 1:
            raise ValueError(f"tokens must be at least 1, got {self.tokens}")


@dataclass(frozen=True)
class PaddedCameraConfig(PrefixCameraConfig):
    """Cameras whose images are resized to a square and filled up.

    The aspect ratio is kept.
    """

    image_size: int  # pixels of the square's side
    fill: float  # the value around an image, whose own are from -1 to 1
    centred: bool  # whether an image is in the middle of the square, or at its right and bottom edge
    filtered: bool  # whether Pillow resizes it, which averages pixels and rounds, or neighbours are weighted

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image_size < 1:
            raise ValueError(f"image_size must be at least 1, got {self.image_size}")
        if not math.isfinite(self.fill):
            raise ValueError(f"fill must be finite, got {self.fill}")


@dataclass(frozen=True)
class FixedCameraConfig(CameraConfig):
    """Cameras whose images have one size each, which is not changed."""

    heights: tuple[int, ...]  # pixels, by camera
    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("heights", "widths"):
            self._check_sizes(name)

    def _check_sizes(self, name: str) -> None:
        values = getattr(self, name)
        if len(values) != len(self.names) or min(values) < 1:
            raise ValueError(f"{name} must have {len(self.names)} values of at least 1, got {values}")


@dataclass(frozen=True)
class GridCameraConfig(FixedCameraConfig):
    """Cameras whose images become rows that actions attend to, by place."""

    tokens: tuple[int, ...]  # rows of an image, by camera

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_sizes("tokens")


@dataclass(frozen=True)
class PolicyConfig:
    """What all policies have."""

    rtc_max_delay: ClassVar[int] = 0  # LeRobot 0.4.4 trains no policy to continue chunks of actions
    has_flow: ClassVar[bool] = False
    from_noise: ClassVar[bool] = False  # whether actions come from noise, of which a request may have several

    cameras: CameraConfig
    state: StateConfig | None  # None if the model takes none
    action_space: AffineSpaceConfig

    kind: str = field(default="", kw_only=True)  # a Literal in each policy

    def __post_init__(self) -> None:
        known = 0 if self.state is None else self.state.dim
        if any(place >= known for place in self.action_space.state_places):
            raise ValueError(f"relative actions need as many values of the state, got {known}")

    @property
    def max_prefix_rows(self) -> int:
        """Return the maximum number of rows that actions attend to."""
        raise NotImplementedError

    @property
    def observation_steps(self) -> int:
        """Return the number of observations that a plan takes.

        The observations are the present one and those before it, `action_space.dt` apart.
        """
        return 1

    @property
    def earlier_observations(self) -> tuple[float, ...]:
        """Return how long ago the observations before the present one are, in s.

        The oldest one comes first.
        """
        return tuple(i * self.action_space.dt for i in range(self.observation_steps - 1, 0, -1))


@dataclass(frozen=True)
class FlowPolicyConfig(PolicyConfig):
    """A policy whose actions come from noise, for a task in words.

    All but X-VLA make them by a flow.
    """

    has_flow: ClassVar[bool] = True
    from_noise: ClassVar[bool] = True

    cameras: PrefixCameraConfig  # of one form in each policy
    state: StateConfig
    max_prompt_tokens: int
    prompt_before: tuple[int, ...]  # tokens that the tokenizer puts before a text, and after it
    prompt_after: tuple[int, ...]
    num_denoise_steps: int  # default number of Euler steps

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_prompt_tokens", "num_denoise_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def max_prefix_rows(self) -> int:
        """Return the maximum number of rows of a prefix: images, and the task in words."""
        return len(self.cameras.names) * self.cameras.tokens + self.max_prompt_tokens


@dataclass(frozen=True)
class SmolVLAConfig(FlowPolicyConfig):
    """SmolVLA: images, task and state are the prefix.

    Actions attend to the prefix's keys and values by layer.
    """

    cameras: PaddedCameraConfig
    kind: Literal["smolvla"] = field(default="smolvla", kw_only=True)

    @property
    def max_prefix_rows(self) -> int:
        """Return the maximum number of rows of a prefix: images, task, and state."""
        return super().max_prefix_rows + 1


@dataclass(frozen=True)
class Pi0Config(FlowPolicyConfig):
    """pi0: images and task are the prefix; the state is a row before the actions."""

    cameras: PaddedCameraConfig
    cleaned: bool  # whether the task is stripped, with spaces in place of underscores and line breaks
    kind: Literal["pi0"] = field(default="pi0", kw_only=True)


@dataclass(frozen=True)
class Pi05Config(FlowPolicyConfig):
    """pi0.5: images and a prompt of task and state are the prefix."""

    cameras: PaddedCameraConfig
    cleaned: bool  # whether a task without numbers is stripped, with spaces in place of "_" and line breaks
    prompted_values: int  # of the model's state in the prompt, as numbers of bins; 0 = the task alone
    kind: Literal["pi05"] = field(default="pi05", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.prompted_values <= self.state.model_dim:
            most = self.state.model_dim
            raise ValueError(f"prompted_values must be from 0 to {most}, got {self.prompted_values}")


@dataclass(frozen=True)
class XVLAConfig(FlowPolicyConfig):
    """X-VLA: images, task and soft prompts are the prefix, whose rows see the actions.

    The model predicts the clean actions, on which a step puts less of the noise of the start.
    """

    has_flow: ClassVar[bool] = False

    cameras: PaddedCameraConfig
    action_space: TipSpaceConfig
    kind: Literal["xvla"] = field(default="xvla", kw_only=True)


@dataclass(frozen=True)
class ACTConfig(PolicyConfig):
    """ACT: one engine, from images and state to a chunk of actions.

    Nothing is random, and there is no text.
    """

    cameras: GridCameraConfig
    other_rows: int  # of the encoder, besides those of images: latent, state, environment state
    kind: Literal["act"] = field(default="act", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.other_rows < 1:
            raise ValueError(f"other_rows must be at least 1, got {self.other_rows}")

    @property
    def max_prefix_rows(self) -> int:
        """Return the number of rows of the encoder."""
        return sum(self.cameras.tokens) + self.other_rows


def _check_model_dim(model_dim: int, dim: int) -> None:
    if model_dim < dim:
        raise ValueError(f"model_dim {model_dim} is less than the {dim} names")
