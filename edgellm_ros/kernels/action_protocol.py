# SPDX-License-Identifier: Apache-2.0
"""The protocol of the kernels between two runs of an action head's engine.

Letters in shapes: n samples, T actions of each, A values of an action. All tensors are fp32 but `clean`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from edgellm_ros.engine.tensor import Tensor


@dataclass(frozen=True)
class ConditionedStep:
    """Tensors of an Euler step that continues a chunk, on the device.

    See `ActionKernels.conditioned_step`.
    """

    previous: Tensor  # [T,A] fp32
    factors: Tensor  # [3,T] fp32
    clean: Tensor  # [1] i64: the first rows, whose time is that of finished actions
    clean_time_row: Tensor  # [H] fp32, the time_row of this time


@dataclass(frozen=True)
class DenoisingFactors:
    """Factors of `ActionKernels.denoising_step`."""

    # clean actions = (of_x * x + of_output * output) / divisor, clipped to [-limit, limit]
    of_x: float
    of_output: float
    divisor: float
    limit: float  # infinite = they are not clipped
    # the next x = clean_share * clean + x_share * x + output_share * output + noise_share * noise
    clean_share: float
    x_share: float
    output_share: float
    noise_share: float


class ActionKernels(Protocol):
    """Steps of trajectories x [n,T,A], which are changed in place."""

    def euler_step(self, x: Tensor, velocity: Tensor, dt: float, time: Tensor, next_time: float) -> None:
        """Add dt * velocity to x in place, and write next_time to time [N] f32."""
        ...

    def conditioned_step(
        self, x: Tensor, velocity: Tensor, previous: Tensor, factors: Tensor, dt: float, time: Tensor
    ) -> None:
        """Add dt * (a * velocity + b * (previous - x)) to x, and write the next times.

        previous [T,A]; factors [3,T]: a, b and the next time of each row; time [N], N <= T, gets the first
        ones.
        """
        ...

    def denoising_step(
        self,
        x: Tensor,
        output: Tensor,
        noise: Tensor | None,
        factors: DenoisingFactors,
        time: Tensor,
        next_time: float,
    ) -> None:
        """Replace x by the next x of `DenoisingFactors`, and write next_time to time [N].

        output: of the engine, noise: that the step adds, both in x's shape; None = it adds none.
        """
        ...
