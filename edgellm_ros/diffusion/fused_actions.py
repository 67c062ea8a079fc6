# SPDX-License-Identifier: Apache-2.0
"""FusedActions: what ActionRunner needs of an action head's fused kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from edgellm_ros.diffusion.time_embedding import TimeEmbedding
from edgellm_ros.engine.tensor import Tensor


@dataclass(frozen=True)
class ConditionedStep:
    """Tensors of an Euler step that continues a chunk, on the device: see `Kernels.conditioned_step`."""

    previous: Tensor  # [T,A] fp32
    factors: Tensor  # [3,T] fp32
    clean: Tensor  # [1] i64: the first rows, whose time is that of finished actions
    clean_time_row: Tensor  # [H] fp32, the time_row of this time


class Expert(Protocol):
    """What runs an Euler step: a `FusedExpert`."""

    def step(
        self,
        tensors: Mapping[str, Tensor],
        time_row: Tensor,
        dt: float,
        first: bool,
        conditioned: ConditionedStep | None = None,
    ) -> None:
        """Queue one step: trajectory += dt * velocity, or `Kernels.conditioned_step`."""
        ...


@dataclass(frozen=True)
class FusedActions:
    """The fused kernels of an action head, loaded."""

    expert: Expert
    times: TimeEmbedding
    shared: dict[str, Tensor]  # weights on the device, by name of the graph's initializer
