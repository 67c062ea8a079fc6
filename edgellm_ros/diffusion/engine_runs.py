# SPDX-License-Identifier: Apache-2.0
"""EngineRuns: the runs of a head's engine in one step."""

from __future__ import annotations

from dataclasses import dataclass

from edgellm_ros.diffusion.action_head import BoundContext
from edgellm_ros.engine.device import Device
from edgellm_ros.engine.executor import BoundRun, EngineExecutor
from edgellm_ros.engine.tensor import Tensor


@dataclass(frozen=True)
class StepOfSamples:
    """The tensors of a step that differ between samples."""

    trajectory: Tensor  # [n,T,A] fp32
    output: Tensor  # [n,T,A] fp32
    name: str  # of the output


class EngineRuns:
    """Queues the engine for all samples.

    That is one run, or a run of each if the engine takes one sample alone. of_time: the engine's input that
    depends on the time, by name.
    """

    def __init__(self, executor: EngineExecutor, device: Device, of_time: dict[str, Tensor]) -> None:
        self._executor, self._device, self._of_time = executor, device, of_time
        self._is_single = executor.bindings["trajectory"].shape[0] == 1

    def prepare(self, step: StepOfSamples, context: BoundContext) -> tuple[BoundRun, ...]:
        """Bind the runs; return them."""
        runs = []
        for first, size in self._parts(step):
            self._bind(step, context, first, size)
            runs.append(self._executor.bound_run)
        return tuple(runs)

    def execute(self, step: StepOfSamples, context: BoundContext) -> None:
        """Queue the runs."""
        for first, size in self._parts(step):
            self._bind(step, context, first, size)
            self._executor.execute(self._device.stream)

    def _parts(self, step: StepOfSamples) -> list[tuple[int, int]]:
        """List the first sample and the number of samples of each run."""
        samples = step.trajectory.shape[0]
        size = 1 if self._is_single else samples
        return [(first, size) for first in range(0, samples, size)]

    def _bind(self, step: StepOfSamples, context: BoundContext, first: int, size: int) -> None:
        own = {
            "trajectory": step.trajectory.rows(first, first + size),
            **self._of_time,
            step.name: step.output.rows(first, first + size),
        }
        self._executor.prepare(0, {"n": size, **context.dims}, own | context.tensors, self._device.stream)
