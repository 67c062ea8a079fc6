# SPDX-License-Identifier: Apache-2.0
"""Errors for TensorRT's messages.

Messages are all that the library says of a failure.
"""

from __future__ import annotations

import re

from edgellm_ros.engine.errors import DeviceLostError, DeviceMemoryError, EngineError
from edgellm_ros.engine.tensorrt.plan_file import PlanFile, listed

OUT_OF_MEMORY = (
    "out of memory",
    "outofmemory",
    "failed_allocation",
    "could not be allocated",
    "gpu memory allocation failed",
    "current gpu only has",
)
LOST = ("illegal memory access", "unspecified launch failure", "misaligned address", "device-side assert")
# Words of TensorRT's reasons for not loading a plan, with their meaning; the first that match count. TensorRT
# 11.4 writes "[file::function::line] Error Code 1: Cuda Runtime (...)" or "IRuntime::deserializeCudaEngine:
# Error Code 1: Serialization (...)". Names of files and functions say nothing about the reason.
NAMES = re.compile(r"\[[^\[\]]*::[^\[\]]*\]|[\w~]+(?:::[\w~]+)+(?:\([^()]*\))?")
GPU_REASON = (
    "cuda runtime",
    "cuda driver",
    "cuda initialization",
    "cuda error",
    "cudaerror",
    "insufficient driver",
    "cuda gpu properties",
)
BAD_PLAN = (
    (("engine with lean runtime",), "the plan contains code, which the user has not allowed"),
    (("header.magictag",), "the file is no plan of this library, or damaged"),
    (
        (
            "incompatible device",
            "expecting compute",
            "compute capability",
            "current device",
            "platform specific tag",
        ),
        "the plan was made for another GPU or platform",
    ),
    (
        (
            "version of tensorrt",
            "version tag",
            "expecting library version",
            "serialization version",
            "runtime major version",
            "deserialization call on a newer plan",
            "supported starting tensorrt",
            "created with tensorrt-rtx",
        ),
        "another TensorRT made the plan",
    ),
    (
        (
            "serialization assertion",
            "magic tag",
            "not a valid plan",
            "no engine found in plan",
            "empty blob",
            "empty memory buffer",
            "buffersize >= minbuffersize",
            "size specified in header",
            "endofarchive",
            "post deserialization check",
            "failed to read plan",
            "planentrytype",
            "truncated",
            "corrupt",
        ),
        "the file is damaged or no plan",
    ),
)


def engine_error(message: str) -> EngineError:
    """Make the kind of EngineError that fits a message of TensorRT."""
    lowered = message.lower()
    if any(words in lowered for words in OUT_OF_MEMORY):
        return DeviceMemoryError(message)
    if any(words in lowered for words in LOST):
        return DeviceLostError(message)
    return EngineError(message)


def plan_error(plan: PlanFile, title: str, gpu: str, reason: str) -> EngineError:
    """Make the error for a plan that a library cannot load on a GPU.

    `title`: name and version of the library; `reason`: its own words. The text adds their meaning and advice.
    """
    error = engine_error(f"{plan.path}: {title} cannot load the plan on {gpu}: {reason}")
    if type(error) is not EngineError:
        return error
    words = NAMES.sub("", reason).lower()
    if any(word in words for word in GPU_REASON):
        return EngineError(f"{error} (the GPU or its driver is the reason, not the plan: see `nvidia-smi`)")
    meaning = next((text for found, text in BAD_PLAN if any(word in words for word in found)), "")
    advice = f"`edgellm build {plan.path.parent.parent}` makes one for this GPU and this library"
    return EngineError(
        f"{error} ({meaning + ': ' if meaning else ''}the plan is for {listed(plan.gpus)}; {advice})"
    )
