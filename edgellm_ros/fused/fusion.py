# SPDX-License-Identifier: Apache-2.0
"""FusedFusion: a draft head's `fc` on several rows side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgellm_ros.fused.params import FusedStatesParams, FuseParams, KernelParams
from edgellm_ros.fused.plan.fusion import FusionPlan, FusionShape
from edgellm_ros.fused.plan.launch import Launch
from edgellm_ros.fused.variants import compile_all
from edgellm_ros.fused.weights import FusionWeights


@dataclass(frozen=True)
class StateFusion:
    """A draft head's fusion of the residual stream at the inputs of three layers.

    layers: counted from 0; the number of layers is the output of the last.
    """

    layers: tuple[int, ...]
    shape: FusionShape
    weights: FusionWeights


class FusedFusion:
    """The fusion or projection of one draft head on one device.

    compile: makes a program of a plan, an object with the method `launch` of `FusedProgram`.
    """

    def __init__(
        self,
        device: Any,
        shape: FusionShape,
        weights: FusionWeights,
        compile: Callable[[FusionPlan], Any],
        threads: int = 256,
    ) -> None:
        self._shape, self._weights = shape, weights
        limits, plans, rows = (device.multiprocessors, device.most_shared_memory), {}, 1
        while rows < 2 * shape.max_rows:
            plans[rows] = FusionPlan(shape, rows, *limits, threads)
            rows *= 2
        programs = compile_all(compile, plans)
        self._variants = {rows: (plan, programs[rows]) for rows, plan in plans.items()}
        nbytes = max(plan.scratch_bytes for plan, _ in self._variants.values())
        self._parts = device.empty((nbytes,), np.uint8)

    def launches(
        self, states: Sequence[int], out: int, rows: int, early: bool, first: bool = False
    ) -> Iterator[tuple[Any, Launch, KernelParams]]:
        """Yield program, kernel and parameters of each launch.

        states: addresses of tensors [rows,state_size]; out: address of a tensor [rows,fused_size]; early,
        first: see `FusionPlan.launches`.
        """
        plan, program = next(each for size, each in self._variants.items() if size >= rows)
        weights, (fuse, finish) = self._weights, plan.launches(early, first)
        parts = self._parts.pointer
        low, middle, high = (*states, 0)[:3]
        low_norm, middle_norm, high_norm = weights.norms
        yield (
            program,
            fuse,
            FuseParams(
                weights=weights.fc,
                low=low,
                middle=middle,
                high=high,
                low_norm=low_norm,
                middle_norm=middle_norm,
                high_norm=high_norm,
                partials=parts,
                rows=rows,
            ),
        )
        yield program, finish, FusedStatesParams(partials=parts, bias=weights.bias, out=out, rows=rows)
