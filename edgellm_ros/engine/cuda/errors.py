# SPDX-License-Identifier: Apache-2.0
"""Status codes of the CUDA driver as our errors."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver

from edgellm_ros.engine.errors import DeviceLostError, DeviceMemoryError, EngineError

_Result = driver.CUresult
_SUCCESS = _Result.CUDA_SUCCESS
# After one of these results every later call in this process fails.
LOST = {
    _Result.CUDA_ERROR_ECC_UNCORRECTABLE,
    _Result.CUDA_ERROR_ILLEGAL_ADDRESS,
    _Result.CUDA_ERROR_LAUNCH_TIMEOUT,
    _Result.CUDA_ERROR_CONTEXT_IS_DESTROYED,
    _Result.CUDA_ERROR_ASSERT,
    _Result.CUDA_ERROR_HARDWARE_STACK_ERROR,
    _Result.CUDA_ERROR_ILLEGAL_INSTRUCTION,
    _Result.CUDA_ERROR_MISALIGNED_ADDRESS,
    _Result.CUDA_ERROR_INVALID_ADDRESS_SPACE,
    _Result.CUDA_ERROR_INVALID_PC,
    _Result.CUDA_ERROR_LAUNCH_FAILED,
    _Result.CUDA_ERROR_DEINITIALIZED,
    _Result.CUDA_ERROR_DEVICE_UNAVAILABLE,
}


def check(result: tuple[Any, ...], doing: str) -> Any:
    """Return the value of a driver call. EngineError names the failed operation.

    `doing`: the operation, as in "CUDA_ERROR_... `doing`". DeviceMemoryError, DeviceLostError.
    """
    status = result[0]
    if status == _SUCCESS:
        return result[1] if len(result) > 1 else None
    name = status.name
    if status == _Result.CUDA_ERROR_OUT_OF_MEMORY:
        raise DeviceMemoryError(f"out of GPU memory {doing}")
    if status in LOST:
        raise DeviceLostError(
            f"the GPU stopped working for this process ({name} {doing}): only a new process can use it again"
        )
    raise EngineError(f"CUDA: {name} {doing}")
