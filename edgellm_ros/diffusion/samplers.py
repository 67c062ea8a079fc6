# SPDX-License-Identifier: Apache-2.0
"""Samplers: how a head's engine takes noise to actions, in steps.

- `FlowTime`: Euler steps along the velocity of a flow, as of SmolVLA
- `NoiseSchedule`: steps of DDPM or DDIM, which take away noise, as of Diffusion Policy
- `StartNoise`: steps that put less of the same noise on predicted actions, as of X-VLA

Source of the schedule: diffusers 0.35.2, schedulers/scheduling_ddpm.py and scheduling_ddim.py. Source of
`StartNoise`: LeRobot 0.6.1, policies/xvla/modeling_xvla.py (XVLAModel.generate_actions).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np

from edgellm_ros.diffusion.diffusion_policy_config import NoiseScheduleConfig
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels import DenoisingFactors, Kernels

MOST_BETA = 0.999  # of squaredcos_cap_v2


class StepTensors(NamedTuple):
    """The tensors of a step, on the device."""

    trajectory: Tensor  # [n,T,A] fp32, changed in place
    output: Tensor  # [n,T,A] fp32, of the engine
    time: Tensor  # [N] fp32, the engine's input; gets the time of the next step
    noise: Tensor | None  # [n,T,A] fp32, that the step adds; None if it adds none


class Sampler(Protocol):
    """The steps from noise to actions, whose number is free."""

    @property
    def output(self) -> str:
        """Name of the engine's output."""
        ...

    @property
    def adds_start(self) -> bool:
        """Whether the noise that steps add is that of the start, and not drawn for each."""
        ...

    def noises(self, steps: int) -> int:
        """Return how many of the steps, from the first one on, add noise."""
        ...

    def time(self, number: int, steps: int) -> float:
        """Return the model's time in a step; steps count from 0."""
        ...

    def queue(self, kernels: Kernels, tensors: StepTensors, number: int, steps: int) -> None:
        """Queue what follows the engine's run in a step; steps count from 0."""
        ...


@dataclass(frozen=True)
class FlowTime:
    """A flow, by its time as the model counts it: at the noise, and at the actions."""

    noise: float
    actions: float
    output = "velocity"
    adds_start = False

    @property
    def direction(self) -> float:
        """Return how much the model's time changes on the whole way, with its sign."""
        return self.actions - self.noise

    def at(self, share: Any) -> Any:
        """Return the time after a share of the way from the noise to the actions."""
        return self.noise + self.direction * share

    def factors(self, factors: np.ndarray) -> np.ndarray:
        """Convert factors [steps,3,T] to those of the model's time.

        The factors are those of `ActionKernels.conditioned_step`. They are strength and pull of a step of
        positive size, and the next times from 0 (noise) to 1.
        """
        strength, pull, next_times = np.moveaxis(factors, 1, 0)
        return np.stack([strength * np.float32(self.direction), pull, self.at(next_times)], axis=1)

    def noises(self, steps: int) -> int:
        return 0

    def time(self, number: int, steps: int) -> float:
        return float(self.at(number / steps))

    def queue(self, kernels: Kernels, tensors: StepTensors, number: int, steps: int) -> None:
        next_time = self.time(number + 1, steps)
        kernels.euler_step(
            tensors.trajectory, tensors.output, self.direction / steps, tensors.time, next_time
        )


NOISE_AT_0 = FlowTime(0.0, 1.0)
NOISE_AT_1 = FlowTime(1.0, 0.0)


@dataclass(frozen=True)
class NoiseSchedule:
    """DDPM or DDIM with one configuration.

    The model's time is a step of the training, which falls to 0. Steps of a run are an equal number of
    training's steps apart ("leading" in diffusers). Factors are computed in fp32, as by diffusers.
    """

    config: NoiseScheduleConfig
    output = "prediction"
    adds_start = False

    def noises(self, steps: int) -> int:
        return steps - 1 if self.config.sampler == "DDPM" else 0

    def time(self, number: int, steps: int) -> float:
        return float(self.times(steps)[number])

    def times(self, steps: int) -> np.ndarray:
        """Return the model's times [steps] int64."""
        return np.arange(steps)[::-1] * (self.config.train_steps // steps)

    def queue(self, kernels: Kernels, tensors: StepTensors, number: int, steps: int) -> None:
        next_time = self.time(number + 1, steps) if number + 1 < steps else 0.0
        trajectory, output, time, noise = tensors
        kernels.denoising_step(trajectory, output, noise, self.factors(number, steps), time, next_time)

    @cached_property
    def kept(self) -> np.ndarray:
        """The clean actions' share of the noisy ones' variance [train_steps] fp32."""
        alphas = np.float32(1) - training_betas(self.config)
        return np.cumprod(alphas.astype(np.float64)).astype(np.float32)

    def factors(self, number: int, steps: int) -> DenoisingFactors:
        """Compute the factors of a step."""
        times, one = self.times(steps), np.float32(1)
        kept = self.kept[times[number]]
        kept_next = self.kept[times[number + 1]] if number + 1 < steps else one
        noisy, noisy_next = one - kept, one - kept_next
        is_epsilon = self.config.prediction == "epsilon"
        clean = (one, -np.sqrt(noisy), np.sqrt(kept)) if is_epsilon else (0.0, 1.0, 1.0)
        if self.config.sampler == "DDIM":
            toward = np.sqrt(noisy_next)
            # the noise is the output, or what the output leaves of x
            noise = (0.0, toward)
            if not is_epsilon:
                noise = (toward / np.sqrt(noisy), -toward * np.sqrt(kept) / np.sqrt(noisy))
            shares = (np.sqrt(kept_next), *noise, 0.0)
        else:
            ratio = kept / kept_next
            beta = one - ratio
            variance = max(noisy_next / noisy * beta, np.float32(1e-20))
            shares = (
                np.sqrt(kept_next) * beta / noisy,
                np.sqrt(ratio) * noisy_next / noisy,
                0.0,
                np.sqrt(variance),
            )
        limit = math.inf if self.config.clip is None else self.config.clip
        of_x, of_output, divisor = clean
        return DenoisingFactors(*map(float, (of_x, of_output, divisor, limit, *shares)))


@dataclass(frozen=True)
class StartNoise:
    """Steps of a model that predicts the clean actions.

    The next x is (1 - t) times the prediction plus t times the noise of the start. The model's time t falls
    from 1 to 0 in equal steps. No flow has these steps: x is not what an Euler step would make of it.
    """

    output = "prediction"
    adds_start = True

    def noises(self, steps: int) -> int:
        return steps - 1

    def time(self, number: int, steps: int) -> float:
        return (steps - number) / steps

    def queue(self, kernels: Kernels, tensors: StepTensors, number: int, steps: int) -> None:
        trajectory, output, time, noise = tensors
        next_time = self.time(number + 1, steps)
        clean = {"of_x": 0.0, "of_output": 1.0, "divisor": 1.0, "limit": math.inf}
        factors = DenoisingFactors(
            **clean, clean_share=1 - next_time, x_share=0.0, output_share=0.0, noise_share=next_time
        )
        kernels.denoising_step(trajectory, output, noise, factors, time, next_time)


def training_betas(config: NoiseScheduleConfig) -> np.ndarray:
    """Return the variance that each step of the training adds [train_steps] fp32."""
    count, low, high = config.train_steps, config.beta_start, config.beta_end
    if config.beta_schedule == "linear":
        return np.linspace(low, high, count).astype(np.float32)
    if config.beta_schedule == "scaled_linear":
        return np.linspace(low**0.5, high**0.5, count).astype(np.float32) ** 2

    def kept(share: float) -> float:
        return math.cos((share + 0.008) / 1.008 * math.pi / 2) ** 2

    betas = [min(1 - kept((i + 1) / count) / kept(i / count), MOST_BETA) for i in range(count)]
    return np.array(betas, np.float32)
