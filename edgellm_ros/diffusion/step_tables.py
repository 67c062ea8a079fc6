# SPDX-License-Identifier: Apache-2.0
"""What steps need of their times, computed for all steps of a request at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from edgellm_ros.diffusion.samplers import FlowTime
from edgellm_ros.engine.device import Device, on_device
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine.tensor import Tensor

KEPT_TABLES = 4  # one of a pi0.5 has 0.5 MB for each step
MODULATION = "modulation"  # the binding of both engines


class StepTables:
    """Tables on the device with a row for each step, by the number of steps.

    make: makes one. The latest ones are kept.
    """

    def __init__(self, make: Callable[[int], Tensor]) -> None:
        self._kept = lru_cache(KEPT_TABLES)(make)

    def of(self, steps: int) -> Tensor:
        """Return the table of a request with so many steps."""
        return self._kept(steps)


class StepConditions:
    """Runs `action/modulation`, which replaces the times of the action engine.

    inputs: the action engine's, by name; flow: that of the head.
    """

    def __init__(self, executor: EngineExecutor, device: Device, flow: FlowTime) -> None:
        self._executor, self._device, self._flow = executor, device, flow
        self._width = int(executor.bindings[MODULATION].shape[1])
        self._current = device.empty((1, self._width), np.float32)
        self._tables = StepTables(self._made)
        self.inputs = {MODULATION: self._current}

    def table(self, steps: int) -> Tensor:
        """Return what the engine takes in each of `steps` steps, [steps,W] fp32."""
        return self._tables.of(steps)

    def select(self, steps: int, number: int) -> None:
        """Queue a row of the table to be the action engine's input."""
        self._device.copy(self._current, self.table(steps).rows(number, number + 1))

    def _made(self, steps: int) -> Tensor:
        times = self._flow.at(np.arange(steps) / steps).astype(np.float32)
        table = self._device.empty((steps, self._width), np.float32)
        tensors = {"time": on_device(self._device, times), MODULATION: table}
        self._executor.prepare(0, {"N": steps}, tensors, self._device.stream)
        self._executor.execute(self._device.stream)
        return table
