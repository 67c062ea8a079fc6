# SPDX-License-Identifier: Apache-2.0
"""Launches the kernels of a compiled program on a device's stream."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from cuda.bindings import driver
from cuda.core import Kernel, LaunchConfig, ObjectCode, launch

from edgellm_ros.engine.cuda.device import CudaDevice
from edgellm_ros.engine.cuda.errors import check
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.kernels.capability import EARLY_START, compute_capability

Grid = tuple[int, ...]


class CudaProgram:
    """The kernels in a cubin for the device's architecture.

    early: kernels may start before those before them have ended, where the GPU supports it; each waits by
    itself (`pdl_wait`).
    """

    def __init__(self, device: CudaDevice, cubin: bytes, early: bool = False) -> None:
        device.activate()
        self._device = device
        self._code = ObjectCode.from_cubin(cubin)
        self._kernels: dict[str, Kernel] = {}
        self._early = early and compute_capability(device.arch) >= EARLY_START

    def launch(self, name: str, grid: Grid, threads: int, *arguments: Any, cooperative: bool = False) -> None:
        """Queue a kernel.

        An int (a number or an address) is passed as 64 bits, a float as a double. EngineError if it cannot be
        queued.
        """
        self._device.activate()
        try:
            kernel = self._kernels.get(name) or self._load(name)
            config = _config(grid, threads, cooperative, self._early and not cooperative)
            launch(self._device.stream, config, kernel, *arguments)
        except Exception as error:  # cuda-core's own class is not public; its text begins with the status
            status = driver.CUresult.__members__.get(str(error).split(":")[0])
            if status is not None:
                check((status,), f"launching the kernel {name}")
            raise EngineError(f"cannot launch the kernel {name} on {list(grid)} blocks: {error}") from error

    def function(self, name: str) -> driver.CUfunction:
        """Return a kernel as a driver function, valid as long as this program."""
        kernel = driver.CUkernel(int(self._load(name).handle))
        return check(driver.cuKernelGetFunction(kernel), f"loading the kernel {name}")

    def _load(self, name: str) -> Kernel:
        self._kernels[name] = self._code.get_kernel(name)
        return self._kernels[name]


@lru_cache(maxsize=1024)
def _config(grid: Grid, threads: int, cooperative: bool, early: bool) -> LaunchConfig:
    return LaunchConfig(
        grid=grid, block=threads, is_cooperative=cooperative, programmatic_stream_serialization=early
    )
