# SPDX-License-Identifier: Apache-2.0
"""FusedActions: what ActionRunner needs of an action head's fused kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from edgellm_ros.diffusion.time_embedding import TimeEmbedding
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.kernels import ConditionedStep


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
