# SPDX-License-Identifier: Apache-2.0
"""Launches of the kernels between two runs of an action head's engine."""

from __future__ import annotations

from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels.action_protocol import DenoisingFactors
from edgellm_ros.kernels.cuda.launches import CudaLaunches, check_float32


class CudaActionKernels(CudaLaunches):
    """The steps of trajectories on a GPU; `ActionKernels` documents the methods."""

    def euler_step(self, x: Tensor, velocity: Tensor, dt: float, time: Tensor, next_time: float) -> None:
        check_float32(x, velocity, time)
        self._by_element(
            "euler_step", x.size,
            x=x, velocity=velocity, size=x.size, dt=float(dt), time=time, times=time.size,
            next_time=float(next_time),
        )  # fmt: skip

    def conditioned_step(
        self, x: Tensor, velocity: Tensor, previous: Tensor, factors: Tensor, dt: float, time: Tensor
    ) -> None:
        check_float32(x, velocity, previous, factors, time)
        self._by_element(
            "conditioned_step", x.size,
            x=x, velocity=velocity, previous=previous, factors=factors, size=x.size,
            rows=previous.shape[0], actions=previous.shape[1], dt=float(dt), time=time, times=time.size,
        )  # fmt: skip

    def denoising_step(
        self,
        x: Tensor,
        output: Tensor,
        noise: Tensor | None,
        factors: DenoisingFactors,
        time: Tensor,
        next_time: float,
    ) -> None:
        check_float32(x, output, time, *([] if noise is None else [noise]))
        self._by_element(
            "denoising_step", x.size,
            x=x, output=output, noise=noise, size=x.size, time=time, times=time.size,
            next_time=float(next_time), **vars(factors),
        )  # fmt: skip
