# SPDX-License-Identifier: Apache-2.0
"""Memory for TensorRT: aligned tensors, one buffer for intermediate results."""

from __future__ import annotations

import weakref

import numpy as np

from edgellm_ros.engine.device import Device
from edgellm_ros.engine.tensor import Tensor

ALIGNMENT = 256  # bytes, of every address given to TensorRT


class ContextMemory:
    """One buffer for the intermediate results of all engines of a device.

    The buffer is allocated on first use. An engine that is loaded later and needs more memory gets a larger
    buffer. Existing contexts keep their buffer, because a graph may have recorded its address.
    """

    def __init__(self, device: Device) -> None:
        self._device = device  # keeps the device alive, so that no other device gets its id
        self._wanted = 0
        self._buffers: list[Tensor] = []

    @classmethod
    def of(cls, device: Device) -> ContextMemory:
        """Return the memory of this device, which lives as long as one of its users."""
        memory = _memory_of_device.get(id(device))
        if memory is None:
            memory = _memory_of_device[id(device)] = cls(device)
        return memory

    def reserve(self, nbytes: int) -> None:
        """Make all later windows at least this large."""
        self._wanted = max(self._wanted, nbytes)

    def window(self) -> tuple[int, int]:
        """Return address and size of the buffer. DeviceMemoryError."""
        if self._wanted and (not self._buffers or self._buffers[-1].size < self._wanted):
            self._buffers.append(aligned(self._device, Tensor(0, (self._wanted,), np.dtype(np.uint8), None)))
        return (self._buffers[-1].pointer, self._buffers[-1].size) if self._buffers else (0, 0)


_memory_of_device: weakref.WeakValueDictionary[int, ContextMemory] = weakref.WeakValueDictionary()


def aligned(device: Device, like: Tensor) -> Tensor:
    """Allocate a tensor of the same shape and type at a multiple of ALIGNMENT."""
    nbytes = like.size * like.dtype.itemsize
    buffer = device.empty((nbytes + ALIGNMENT,), np.uint8)
    start = -buffer.pointer % ALIGNMENT
    window = buffer.rows(start, start + nbytes)
    array = None if window.array is None else window.array.view(like.dtype).reshape(like.shape)
    return Tensor(window.pointer, like.shape, like.dtype, window.owner, array)
