# SPDX-License-Identifier: Apache-2.0
"""Kernels between engines: embedding, RoPE, masks, sampling, trees, Euler steps.

Each kind of device has its own implementation of the same protocol.
"""

from __future__ import annotations

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.kernels.action_protocol import ConditionedStep, DenoisingFactors
from edgellm_ros.kernels.protocol import (
    EXCLUDED,
    RULES,
    Kernels,
    PatchLayout,
    RopeTable,
    RowLimits,
    SamplingState,
    SequenceCache,
    StopState,
)
from edgellm_ros.kernels.tree_protocol import ChainInputs, DraftInputs, DraftTable, DraftTree, TreeKernels

__all__ = [
    "EXCLUDED",
    "RULES",
    "ChainInputs",
    "ConditionedStep",
    "DenoisingFactors",
    "DraftInputs",
    "DraftTable",
    "DraftTree",
    "Kernels",
    "PatchLayout",
    "RopeTable",
    "RowLimits",
    "SamplingState",
    "SequenceCache",
    "StopState",
    "TreeKernels",
    "load_kernels",
    "load_tree_kernels",
]


def load_kernels(device: Device, early: bool = False) -> Kernels:
    """Load the kernels for a device. EngineError for an unsupported kind of memory.

    early: whether they may start before what is queued before them has ended, on GPUs that can. That saves
    time between kernels, so it is for steps that are kernels from end to end.
    """
    if device.memory == "cpu":
        from edgellm_ros.kernels.host import HostKernels

        return HostKernels()
    if device.memory == "cuda":
        from edgellm_ros.kernels.cuda import load_cuda_kernels

        return load_cuda_kernels(device, early)
    raise EngineError(f"no kernels for memory {device.memory!r} (device {device.name!r})")


def load_tree_kernels(device: Device, early: bool = False) -> TreeKernels:
    """Load the kernels of speculative decoding.

    EngineError for an unsupported kind of memory. early: see `load_kernels`.
    """
    if device.memory == "cpu":
        from edgellm_ros.kernels.tree_host import HostTreeKernels

        return HostTreeKernels()
    if device.memory == "cuda":
        from edgellm_ros.kernels.cuda import load_cuda_tree_kernels

        return load_cuda_tree_kernels(device, early)
    raise EngineError(f"no tree kernels for memory {device.memory!r} (device {device.name!r})")
