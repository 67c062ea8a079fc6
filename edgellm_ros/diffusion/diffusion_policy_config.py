# SPDX-License-Identifier: Apache-2.0
"""Configuration of Diffusion Policy and of its noise."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from edgellm_ros.diffusion.policy_config import FixedCameraConfig, PolicyConfig, StateConfig

MOST_TRAIN_STEPS = 100_000
SCHEDULES = {  # of NoiseScheduleConfig: what its fields may be
    "sampler": ("DDPM", "DDIM"),
    "beta_schedule": ("squaredcos_cap_v2", "linear", "scaled_linear"),
    "prediction": ("epsilon", "sample"),
}


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

    The policy reads observations of several times, and computes `model_horizon` actions from the time of the
    oldest one on. A chunk has the first `action_space.horizon` of them from the time of the newest one on.
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
