# SPDX-License-Identifier: Apache-2.0
"""Launches fused kernels, which may start before the kernel before them has ended."""

from __future__ import annotations

import ctypes
from typing import Any

from cuda.bindings import driver
from cuda.core import ObjectCode

from edgellm_ros.engine.cuda_device import CudaDevice
from edgellm_ros.engine.cuda_errors import check
from edgellm_ros.kernels.cuda.fused.plan import Launch

ATTRIBUTES = driver.CUfunction_attribute
EARLY_START = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
CLUSTER = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
PORTABLE_CLUSTER = 8  # blocks that every GPU with clusters takes, as far as their shared memory fits


class FusedProgram:
    """The fused kernels in a cubin for the device's architecture."""

    def __init__(self, device: CudaDevice, cubin: bytes) -> None:
        device.activate()
        self._device = device
        self._code = ObjectCode.from_cubin(cubin)
        self._functions: dict[str, Any] = {}
        self._configs: dict[Launch, Any] = {}

    def launch(self, launch: Launch, *arguments: int) -> None:
        """Queue a kernel; every argument, a number or an address, has 64 bits."""
        self._device.activate()
        config = self._configs.get(launch) or self._configure(launch)
        values = (ctypes.c_int64 * len(arguments))(*arguments)
        first = ctypes.addressof(values)
        places = (ctypes.c_void_p * len(arguments))(*(first + 8 * i for i in range(len(arguments))))
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
        # All kernels divide a multiprocessor's memory alike, so that two of them can run on it at once.
        for attribute, value in (
            (ATTRIBUTES.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),
            (ATTRIBUTES.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared),
        ):
            check(driver.cuFuncSetAttribute(function, attribute, value), f"setting up the kernel {name}")
        self._functions[name] = function
