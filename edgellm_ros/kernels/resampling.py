# SPDX-License-Identifier: Apache-2.0
"""Weights and order of Pillow's bicubic filter for 8-bit channels.

Source: Pillow, src/libImaging/Resample.c. An image is resized in one direction and then in the other. A pixel
is an integer sum of weighted pixels, so another implementation with the same weights and the same order has
the same bits.
"""

from __future__ import annotations

import math

import numpy as np
import PIL

WEIGHT_BITS = 22  # a weight of 1.0 is 2**22


def bicubic_weights(size: int, out_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Compute the pixels of a line that each pixel of the resized line sums up.

    Returns the first pixel [out_size] int32 and the weights [out_size, n] int32 of it and the following ones.
    A resized pixel is (sum of weights * pixels + 2**21) >> 22, limited to 0..255.
    """
    scale = size / out_size
    stretch = max(scale, 1.0)
    reach = 2.0 * stretch
    taps = math.ceil(reach) * 2 + 1
    centers = (np.arange(out_size) + 0.5) * scale
    first = np.maximum((centers - reach + 0.5).astype(np.int64), 0)  # as in C, both casts truncate
    last = np.minimum((centers + reach + 0.5).astype(np.int64), size)
    weights = np.zeros((out_size, taps))
    total = np.zeros(out_size)
    for tap in range(taps):  # in this order, since a sum of doubles depends on it
        inside = first + tap < last
        weights[:, tap] = np.where(inside, _bicubic((tap + first - centers + 0.5) * (1.0 / stretch)), 0.0)
        total += weights[:, tap]
    weights /= np.where(total == 0.0, 1.0, total)[:, None]
    scaled = weights * (1 << WEIGHT_BITS)
    rounded = np.trunc(scaled + np.where(scaled < 0, -0.5, 0.5))
    return first.astype(np.int32), rounded.astype(np.int32)


def height_first(size: tuple[int, int], out_size: tuple[int, int]) -> bool:
    """Return whether the installed Pillow resizes the height before the width.

    Pillow does from version 13 on, if the height shrinks by more than twice as many pixels as the width.
    Sizes are (height, width).
    """
    if int(PIL.__version__.split(".")[0]) < 13:
        return False
    height, width = (before - after for before, after in zip(size, out_size, strict=True))
    return height > 0 and height > 2 * width


def _bicubic(x: np.ndarray) -> np.ndarray:
    """Compute the bicubic filter with a = -0.5, in Pillow's order of operations."""
    a, x = -0.5, np.abs(x)
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))
