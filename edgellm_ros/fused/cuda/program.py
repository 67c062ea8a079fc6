# SPDX-License-Identifier: Apache-2.0
"""Launches fused kernels, which may start before the kernel before them has ended."""

from __future__ import annotations

import ctypes
from typing import Any

from cuda.bindings import driver
from cuda.core import ObjectCode

from edgellm_ros.engine.cuda.device import CudaDevice
from edgellm_ros.engine.cuda.errors import check
from edgellm_ros.fused.params import KernelParams
from edgellm_ros.fused.plan.launch import Launch

ATTRIBUTES = driver.CUfunction_attribute
EARLY_START = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
CLUSTER = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
PORTABLE_CLUSTER = 8  # CTAs of a cluster that every GPU with clusters takes, if their smem fits


class FusedProgram:
    """The fused kernels in a cubin for the device's architecture."""

    def __init__(self, device: CudaDevice, cubin: bytes) -> None:
        device.activate()
        self._device = device
        self._code = ObjectCode.from_cubin(cubin)
        self._functions: dict[str, Any] = {}
        self._configs: dict[Launch, Any] = {}

    def launch(self, launch: Launch, params: KernelParams) -> None:
        """Queue a kernel."""
        self._device.activate()
        config = self._configs.get(launch) or self._configure(launch)
        values = params.pack()
        first, count = ctypes.addressof(values), len(values)
        places = (ctypes.c_void_p * count)(*(first + 8 * i for i in range(count)))
        result = driver.cuLaunchKernelEx(config, self._functions[launch.name], ctypes.addressof(places), 0)
        check(result, f"launching the kernel {launch.name}")

    def most_clusters(self, launch: Launch) -> int:
        """Return how many clusters of a kernel the device can run at once.

        0: it has no room for one.
        """
        self._device.activate()
        config = self._configs.get(launch) or self._configure(launch)
        result = driver.cuOccupancyMaxActiveClusters(self._functions[launch.name], config)
        return int(check(result, f"looking for room for the kernel {launch.name}"))

    def _configure(self, launch: Launch) -> Any:
        self._load(launch.name, launch.shared)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY = launch.grid
        config.blockDimX, config.gridDimZ, config.blockDimY, config.blockDimZ = launch.threads, 1, 1, 1
        config.sharedMemBytes = launch.shared
        config.hStream = driver.CUstream(int(self._device.stream.handle))
        attributes = []
        if launch.early:
            attributes.append(driver.CUlaunchAttribute())
            attributes[-1].id = EARLY_START
            attributes[-1].value.programmaticStreamSerializationAllowed = 1
        if launch.cluster > 1:
            attributes.append(driver.CUlaunchAttribute())
            attributes[-1].id = CLUSTER
            size = attributes[-1].value.clusterDim
            size.x, size.y, size.z = launch.cluster, 1, 1
        config.attrs, config.numAttrs = attributes, len(attributes)
        if launch.cluster > PORTABLE_CLUSTER:
            attribute = ATTRIBUTES.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            result = driver.cuFuncSetAttribute(self._functions[launch.name], attribute, 1)
            check(result, f"setting up the kernel {launch.name}")
        self._configs[launch] = config
        return config

    def _load(self, name: str, shared: int) -> None:
        if name in self._functions:
            return
        handle = driver.CUkernel(int(self._code.get_kernel(name).handle))
        function = check(driver.cuKernelGetFunction(handle), f"loading the kernel {name}")
        # All kernels have the same carveout of smem, so that CTAs of two kernels can be on an SM at once.
        for attribute, value in (
            (ATTRIBUTES.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),
            (ATTRIBUTES.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared),
        ):
            check(driver.cuFuncSetAttribute(function, attribute, value), f"setting up the kernel {name}")
        self._functions[name] = function
