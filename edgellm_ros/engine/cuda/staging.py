# SPDX-License-Identifier: Apache-2.0
"""Pinned host memory, for copies to and from a GPU that do not block the host."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from cuda.bindings import driver

from edgellm_ros.engine.tensor import Shape

RING_BYTES = 1 << 20  # of each half; arrays of token ids, positions and lengths are far smaller
PIECE_BYTES = RING_BYTES // 4  # larger arrays are split: one piece is copied while the next is written
Check = Callable[[tuple[Any, ...], str], Any]


def release_with(owner: Any, context: Any, release: Callable[[Any], Any], handle: Any) -> None:
    """Release a driver's handle together with its owner, in any thread.

    Nothing is released at the end of the process.
    """

    def give_back() -> None:
        driver.cuCtxPushCurrent(context)
        release(handle)
        driver.cuCtxPopCurrent()

    weakref.finalize(owner, give_back).atexit = False


class PinnedSlot:
    """Page-locked host memory, and an event that marks the end of a copy."""

    def __init__(self, context: Any, nbytes: int, check: Check) -> None:
        self.nbytes = nbytes
        self.pointer = int(check(driver.cuMemAllocHost(max(1, nbytes)), "to allocate pinned host memory"))
        release_with(self, context, driver.cuMemFreeHost, self.pointer)
        self.array = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self.pointer))
        flags = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        self.event = check(driver.cuEventCreate(flags), "to make an event")
        release_with(self, context, driver.cuEventDestroy, self.event)
        self._views: dict[tuple[Shape, np.dtype], np.ndarray] = {}

    def read(self, shape: Shape, dtype: np.dtype) -> np.ndarray:
        """Copy the contents to an array of this shape and type, which has as many bytes."""
        view = self._views.get((shape, dtype))
        if view is None:
            view = self._views[shape, dtype] = self.array.view(dtype).reshape(shape)
        return view.copy()


class PinnedPool:
    """Slots for copies to the host, reused for copies of the same size."""

    def __init__(self, context: Any, check: Check) -> None:
        self._context, self._check = context, check
        self._free: dict[int, list[PinnedSlot]] = {}

    def take(self, nbytes: int) -> PinnedSlot:
        free = self._free.get(nbytes)
        return free.pop() if free else PinnedSlot(self._context, nbytes, self._check)

    def give_back(self, slot: PinnedSlot) -> None:
        self._free.setdefault(slot.nbytes, []).append(slot)


class UploadRing:
    """Two halves of pinned memory, filled in turn.

    A half is reused after its copies are complete.
    """

    def __init__(self, context: Any, stream: Any, check: Check) -> None:
        self._stream, self._check = stream, check
        self._halves = [PinnedSlot(context, RING_BYTES, check) for _ in range(2)]
        self._used = 0

    def upload(self, pointer: int, source: np.ndarray) -> None:
        """Queue a copy of a contiguous array to the device.

        The caller may change the array at once. All data is staged in pinned memory: the driver may read
        other memory after its call has returned, depending on the allocation and on the machine.
        """
        contents = source.reshape(-1).view(np.uint8)
        for start in range(0, len(contents), PIECE_BYTES):
            piece = contents[start : start + PIECE_BYTES]
            result = driver.cuMemcpyHtoDAsync(pointer + start, self._stage(piece), len(piece), self._stream)
            self._check(result, "in a copy to the device")

    def _stage(self, source: np.ndarray) -> int:
        if self._used + len(source) > RING_BYTES:
            filled, oldest = self._halves
            self._check(driver.cuEventRecord(filled.event, self._stream), "recording an event")
            self._check(driver.cuEventSynchronize(oldest.event), "in the work queued before")
            self._halves, self._used = [oldest, filled], 0
        offset = self._used
        self._halves[0].array[offset : offset + len(source)] = source
        self._used += -(-len(source) // 64) * 64
        return self._halves[0].pointer + offset
