# SPDX-License-Identifier: Apache-2.0
"""What runs between engines: embedding, rotary rows, masks, sampling, Euler steps.

One twin per kind of device.
"""

from __future__ import annotations

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.kernels.protocol import Kernels, RopeTable, SamplingState, SequenceCache, StopState

__all__ = ["Kernels", "RopeTable", "SamplingState", "SequenceCache", "StopState", "load_kernels"]


def load_kernels(device: Device) -> Kernels:
    """The kernels that work on this device's tensors."""
    if device.memory == "cpu":
        from edgellm_ros.kernels.host import HostKernels

        return HostKernels()
    if device.memory == "cuda":
        from edgellm_ros.kernels.cuda import load_cuda_kernels

        return load_cuda_kernels(device)
    raise EngineError(f"no kernels for memory {device.memory!r} (device {device.name!r})")
