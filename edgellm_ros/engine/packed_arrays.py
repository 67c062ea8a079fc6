# SPDX-License-Identifier: Apache-2.0
"""PackedArrays: host arrays that one copy takes to the device.

A copy of a few bytes costs the host as much as one of many. So the small inputs of a run lie in one buffer,
each at a fixed place: a recorded run finds them there again.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from edgellm_ros.engine.device import ALIGNMENT, Device
from edgellm_ros.engine.tensor import Shape, Tensor

Fields = Mapping[str, tuple[Shape, Any]]  # shape and type of each array, by name
KEPT_LAYOUTS = 64


class PackedArrays:
    """Arrays of one layout: `arrays` on the host, `tensors` on the device, by name."""

    def __init__(self, device: Device, fields: Fields, host: np.ndarray, memory: Tensor) -> None:
        self._device = device
        self.arrays: dict[str, np.ndarray] = {}
        self.tensors: dict[str, Tensor] = {}
        start = 0
        for name, (shape, dtype) in fields.items():
            dtype = np.dtype(dtype)
            end = start + prod(shape) * dtype.itemsize
            place = memory.rows(start, end)
            self.arrays[name] = host[start:end].view(dtype).reshape(shape)
            array = None if place.array is None else place.array.view(dtype).reshape(shape)
            self.tensors[name] = Tensor(place.pointer, tuple(shape), dtype, place.owner, array)
            start += _padded(end - start)
        self._host, self._memory = host[:start], memory.rows(0, start)

    def upload(self) -> None:
        """Queue the copy of all arrays; they may be changed at once."""
        self._device.upload(self._memory, self._host)


class PackedBuffer:
    """The memory of layouts that are used in turns, as large as `largest`."""

    def __init__(self, device: Device, largest: Fields) -> None:
        nbytes = sum(_padded(prod(shape) * np.dtype(dtype).itemsize) for shape, dtype in largest.values())
        self._device = device
        self._host = np.zeros(nbytes, np.uint8)
        self._memory = device.empty((nbytes,), np.uint8)
        self._layouts: dict[tuple[Any, ...], PackedArrays] = {}

    def layout(self, fields: Fields) -> PackedArrays:
        """Return the arrays of a layout: equal fields always have the same memory.

        ValueError for a layout that is larger than the buffer.
        """
        key = tuple((name, *field) for name, field in fields.items())
        found = self._layouts.get(key)
        if found is None:
            if len(self._layouts) >= KEPT_LAYOUTS:
                self._layouts.clear()
            found = self._layouts[key] = PackedArrays(self._device, fields, self._host, self._memory)
        return found


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
