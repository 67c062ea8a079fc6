# SPDX-License-Identifier: Apache-2.0
"""Bilinear images inside a square, as PyTorch resizes them without a filter.

Each operation is rounded to fp32, so another implementation with the same order has the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LEVEL = 2 / 255  # between two values of a pixel, from -1 to 1


@dataclass(frozen=True)
class Placement:
    """Where a resized image is in a square; in pixels."""

    rows: int
    columns: int
    top: int
    left: int


def line_scale(before: int, after: int) -> np.float32:
    """Return how many pixels of a line become one."""
    return np.float32(before) / np.float32(after)


def write_placed(pixels: np.ndarray, placement: Placement, fill: float, out: np.ndarray) -> None:
    """Write out [3,S,S] float32: pixels from -1 to 1, and `fill` around them.

    pixels [3,rows,columns] float32: from 0 to 255.
    """
    out[...] = fill
    rows = slice(placement.top, placement.top + placement.rows)
    inside = out[:, rows, placement.left : placement.left + placement.columns]
    np.multiply(pixels, np.float32(LEVEL), out=inside)
    inside -= np.float32(1)


def resized(image: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Resize an image [H,W,3] uint8 to [3,rows,columns] float32 from 0 to 255.

    Rows become floats after they are chosen: an image that shrinks has few of them.
    """
    if rows == image.shape[0]:
        pixels = image.astype(np.float32)
    else:
        above, below, share = _neighbours(image.shape[0], rows)
        first, second = (np.take(image, each, axis=0).astype(np.float32) for each in (above, below))
        pixels = _mixed(first, second, share[:, None, None])
    if columns != image.shape[1]:
        left, right, share = _neighbours(image.shape[1], columns)
        pixels = _mixed(np.take(pixels, left, axis=1), np.take(pixels, right, axis=1), share[:, None])
    return np.moveaxis(pixels, 2, 0)


def _mixed(first: np.ndarray, second: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Return first + share * (second - first), in the memory of `second`."""
    second -= first
    second *= share
    second += first
    return second


def _neighbours(before: int, after: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Find two neighbours of each pixel of a resized line, and the second's share.

    Both are as PyTorch has them.
    """
    scale = line_scale(before, after)
    places = scale * (np.arange(after, dtype=np.float32) + np.float32(0.5)) - np.float32(0.5)
    places = np.maximum(places, np.float32(0))
    first = np.minimum(places.astype(np.int64), before - 1)
    return first, np.minimum(first + 1, before - 1), places - first.astype(np.float32)
