# SPDX-License-Identifier: Apache-2.0
"""Copy bandwidth of a device, which limits all memory-bound work."""

from __future__ import annotations

import time

import numpy as np

from edgellm_ros.engine.device import Device


def copy_bandwidth(device: Device, megabytes: int = 256, repeats: int = 5) -> float:
    """Measure the copy bandwidth of a device in bytes per second (read plus written).

    The result is the best of several copies of a block, which must be much larger than the device's caches.
    If the device queues work, several copies are timed together, so that waiting for them does not count.
    """
    source = device.zeros((megabytes << 18,), np.float32)
    target = device.zeros(source.shape, source.dtype)
    copies = 1 if device.stream is None else 16
    best = float("inf")
    for _ in range(repeats):
        device.synchronize()
        start = time.perf_counter()
        for _ in range(copies):
            device.copy(target, source)
        device.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * copies * source.size * source.dtype.itemsize / best
