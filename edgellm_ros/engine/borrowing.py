# SPDX-License-Identifier: Apache-2.0
"""Arrays of callers as tensors, without a copy.

Such arrays have DLPack or the array interfaces of NumPy and CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgellm_ros.engine import dlpack
from edgellm_ros.engine.tensor import Tensor


@dataclass(frozen=True, eq=False)
class Borrowed:
    """The owner of a tensor on memory of a caller, which `view` keeps alive."""

    device: Any
    view: Any


def is_array(value: object) -> bool:
    """Return whether a value is an array of some library."""
    names = ("__dlpack__", "__cuda_array_interface__", "__array_interface__")
    return any(hasattr(value, name) for name in names)


def is_on_gpu(value: object) -> bool:
    """Return whether the memory of an array is on a GPU."""
    if isinstance(value, Tensor):
        return value.array is None
    if isinstance(value, np.ndarray):
        return False
    if hasattr(value, "__dlpack_device__"):
        return value.__dlpack_device__()[0] in (dlpack.CUDA, dlpack.CUDA_MANAGED)
    return hasattr(value, "__cuda_array_interface__")


def borrow(device: Any, value: object) -> Tensor:
    """View an array of a caller that is in the memory of a device.

    Work that the device queues from now on waits for the work that the array's own library has queued on it.
    The tensor keeps the memory alive; the caller must not write to it while the tensor is used. ValueError if
    the array is elsewhere, is not contiguous, or has a type that NumPy and ml_dtypes lack.
    """
    if isinstance(value, Tensor) and value.array is None and getattr(value.owner, "device", None) is device:
        return value
    if is_on_gpu(value):
        if device.memory != "cuda":
            raise ValueError(f"the array is on a GPU, and the device is {device.description}")
        tensor: Tensor = device.borrow(value)
        return tensor
    if device.memory == "cuda":
        raise ValueError(f"the array is in host memory, and the device is {device.description}")
    return Tensor.from_array(on_host(value))


def on_host(value: object) -> np.ndarray:
    """View an array in host memory as one of NumPy.

    ValueError if it is elsewhere or no array.
    """
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, Tensor) and value.array is not None:
        return value.array
    if not is_array(value) or is_on_gpu(value):
        raise ValueError(f"expected an array in host memory, got {type(value).__name__}")
    try:
        return np.from_dlpack(value) if hasattr(value, "__dlpack__") else np.asarray(value)
    except (BufferError, RuntimeError, TypeError) as error:  # of the array's library
        raise ValueError(f"cannot read the array, a {type(value).__name__}: {error}") from None


def is_contiguous(shape: Sequence[int], strides: Sequence[int] | None) -> bool:
    """Return whether an array is row-major; strides: in elements, None = row-major."""
    if strides is None or 0 in shape:
        return True
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
