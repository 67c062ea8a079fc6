# SPDX-License-Identifier: Apache-2.0
"""Configurations of policies: models that answer a request with actions only.

A policy with a flow (`FlowPolicyConfig`) has a prefix engine, which computes a context of camera images, a
task in words and the robot's state, and an action engine, which computes velocities from noise to actions and
reads the context. Diffusion Policy has the same two engines without a task; its action engine predicts noise.
ACT has one engine, from images and state to actions. To add a policy, add a class here and what runs it in
`runtime/policy/pipeline.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from edgellm_ros.echo import quoted

MOST_TRAIN_STEPS = 100_000
SCHEDULES = {  # of NoiseScheduleConfig: what its fields may be
    "sampler": ("DDPM", "DDIM"),
    "beta_schedule": ("squaredcos_cap_v2", "linear", "scaled_linear"),
    "prediction": ("epsilon", "sample"),
}


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


@dataclass(frozen=True)
class CameraConfig:
    """The cameras of a policy."""

    names: tuple[str, ...]  # in the order in which the model takes them

    def __post_init__(self) -> None:
        if not self.names or len(set(self.names)) != len(self.names):
            raise ValueError(f"names must be different and at least one, got {self.names}")


@dataclass(frozen=True)
class PaddedCameraConfig(CameraConfig):
    """Cameras whose images are resized to a square and filled up.

    The aspect ratio is kept.
    """

    image_size: int  # pixels of the square's side
    tokens: int  # rows of an image in the prefix
    fill: float  # the value around an image, whose own are from -1 to 1
    centred: bool  # whether an image is in the middle of the square, or at its right and bottom edge

    def __post_init__(self) -> None:
        super().__post_init__()
        if not math.isfinite(self.fill):
            raise ValueError(f"fill must be finite, got {self.fill}")
        if self.image_size < 1 or self.tokens < 1:
            given = f"{self.image_size}, {self.tokens}"
            raise ValueError(f"image_size and tokens must be at least 1, got {given}")


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
        if any(self.action_space.relative[known:]):
            raise ValueError(f"relative actions need as many values of the state, got {known}")

    @property
    def max_prefix_rows(self) -> int:
        """Return the maximum number of rows that actions attend to."""
        raise NotImplementedError

    @property
    def observation_steps(self) -> int:
        """Return the number of observations that a plan takes.

        These are the present one and those before it, `action_space.dt` apart.
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
    """A policy whose actions come from noise by a flow, for a task in words."""

    has_flow: ClassVar[bool] = True
    from_noise: ClassVar[bool] = True

    cameras: PaddedCameraConfig
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

    kind: Literal["smolvla"] = field(default="smolvla", kw_only=True)

    @property
    def max_prefix_rows(self) -> int:
        """Return the maximum number of rows of a prefix: images, task, and state."""
        return super().max_prefix_rows + 1


@dataclass(frozen=True)
class Pi0Config(FlowPolicyConfig):
    """pi0: images and task are the prefix; the state is a row before the actions."""

    kind: Literal["pi0"] = field(default="pi0", kw_only=True)


@dataclass(frozen=True)
class Pi05Config(FlowPolicyConfig):
    """pi0.5: images and a prompt of task and state are the prefix."""

    prompted_values: int  # of the model's state in the prompt, as numbers of bins; 0 = the task alone
    kind: Literal["pi05"] = field(default="pi05", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.prompted_values <= self.state.model_dim:
            most = self.state.model_dim
            raise ValueError(f"prompted_values must be from 0 to {most}, got {self.prompted_values}")


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


@dataclass(frozen=True)
class NoiseScheduleConfig:
    """How the training added noise to actions, and how a run takes it away."""

    sampler: str  # "DDPM" or "DDIM"
    train_steps: int  # of the training, from clean actions to noise
    beta_schedule: str  # of SCHEDULES
    beta_start: float  # of the schedules but squaredcos_cap_v2, which has its own
    beta_end: float
    prediction: str  # of the model: "epsilon" (the noise) or "sample" (the clean actions)
    clip: float | None  # limit of the clean actions in each step, normalised; None = they are not clipped

    def __post_init__(self) -> None:
        for name, supported in SCHEDULES.items():
            if getattr(self, name) not in supported:
                raise ValueError(f"{name} must be of {', '.join(supported)}, got {getattr(self, name)!r}")
        if not 1 <= self.train_steps <= MOST_TRAIN_STEPS:
            raise ValueError(f"train_steps must be from 1 to {MOST_TRAIN_STEPS}, got {self.train_steps}")
        if not 0 < self.beta_start <= self.beta_end < 1:
            given = f"{self.beta_start} and {self.beta_end}"
            raise ValueError(f"beta_start and beta_end must rise between 0 and 1, got {given}")
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ValueError(f"clip must be more than 0, got {self.clip}")


@dataclass(frozen=True)
class DiffusionConfig(PolicyConfig):
    """Diffusion Policy: a U-Net takes noise away from actions.

    It reads observations of several times, and computes `model_horizon` actions from the time of the oldest
    one on. A chunk has the first `action_space.horizon` of them from the time of the newest one on.
    """

    from_noise: ClassVar[bool] = True

    cameras: FixedCameraConfig
    state: StateConfig
    num_observations: int  # of a plan, `action_space.dt` apart
    model_horizon: int
    num_denoise_steps: int  # default number of steps of the sampler
    schedule: NoiseScheduleConfig
    kind: Literal["diffusion"] = field(default="diffusion", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_observations < 1:
            raise ValueError(f"num_observations must be at least 1, got {self.num_observations}")
        left = self.model_horizon - self.first_action
        if self.action_space.horizon > left:
            raise ValueError(
                f"action_space.horizon must be at most {left} (model_horizon - num_observations + 1), got "
                f"{self.action_space.horizon}"
            )
        if not 1 <= self.num_denoise_steps <= self.schedule.train_steps:
            raise ValueError(
                f"num_denoise_steps must be from 1 to {self.schedule.train_steps} (train_steps), got "
                f"{self.num_denoise_steps}"
            )

    @property
    def first_action(self) -> int:
        """Return the U-Net's first action that is not before the newest observation."""
        return self.num_observations - 1

    @property
    def observation_steps(self) -> int:
        return self.num_observations

    @property
    def max_prefix_rows(self) -> int:
        """Return the parts of the condition: of each observation a state and the images."""
        return self.num_observations * (1 + len(self.cameras.names))


@dataclass(frozen=True)
class OpenPiConfig(PolicyConfig):
    """A policy on another computer, which is asked by openpi's protocol.

    Actions and state are sent in physical units, so their statistics change nothing.
    """

    url: str  # ws://HOST:PORT
    token_file: str  # "" = no token
    image_keys: tuple[str, ...]  # of the cameras
    image_size: tuple[
        int, ...
    ]  # height and width to which frames are resized before they are sent; () = as is
    state_keys: tuple[str, ...]  # parts of the state, in order
    state_sizes: tuple[int, ...]  # values of each part
    prompt_key: str
    timeout_s: float  # to connect, and to wait for actions
    kind: Literal["openpi"] = field(default="openpi", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.url.startswith(("ws://", "wss://")):
            raise ValueError(f"url must begin with ws:// or wss://, got {quoted(self.url)}")
        if len(self.image_keys) != len(self.cameras.names):
            raise ValueError(f"image_keys must have {len(self.cameras.names)} keys, got {self.image_keys}")
        if self.image_size and (len(self.image_size) != 2 or not all(0 < n <= 4096 for n in self.image_size)):
            raise ValueError(f"image_size must be height and width from 1 to 4096, got {self.image_size}")
        values = 0 if self.state is None else self.state.dim
        if len(self.state_keys) != len(self.state_sizes) or sum(self.state_sizes) != values:
            raise ValueError(f"state_sizes must make up {values} values, got {self.state_sizes}")
        if not 0 < self.timeout_s <= 600:
            raise ValueError(f"timeout_s must be above 0 and at most 600, got {self.timeout_s}")
        if any(self.action_space.relative):
            raise ValueError("relative must be false: the other computer adds the state")

    @property
    def max_prefix_rows(self) -> int:
        """Return the number of images, which are all that is known of the rows."""
        return max(2, len(self.cameras.names))


def _check_model_dim(model_dim: int, dim: int) -> None:
    if model_dim < dim:
        raise ValueError(f"model_dim {model_dim} is less than the {dim} names")
