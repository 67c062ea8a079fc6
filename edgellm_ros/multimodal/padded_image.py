# SPDX-License-Identifier: Apache-2.0
"""Resizes camera images for policies: bilinear, filled up to a square.

The aspect ratio is kept.

Reference: LeRobot 0.4.4, modeling_smolvla.py, resize_with_pad and SmolVLAPolicy.prepare_images;
modeling_pi05.py, resize_with_pad_torch.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

from edgellm_ros.multimodal.centred_image import fitted_size
from edgellm_ros.multimodal.image_pixels import check_image


def padded_image(
    image: np.ndarray, size: int, fill: float = -1.0, centred: bool = False, filtered: bool = False
) -> np.ndarray:
    """Resize an image [H, W, 3] uint8 to fit into a square [3, size, size] float32.

    Values are from -1 to 1. The image is at the right and bottom edge, or `centred`; the rest is `fill`, of
    which -1 is black. Neighbouring pixels are weighted in fp32, without a filter when the image shrinks, or
    `filtered` by Pillow, which rounds to uint8. ValueError for another shape or type.
    """
    check_image(image)
    rows, columns = fitted_size(image, size, size)
    top, left = size - rows, size - columns
    if centred:
        top, left = top // 2, left // 2
    result = np.full((3, size, size), fill, np.float32)
    inside = result[:, top : top + rows, left : left + columns]
    resize = _filtered if filtered else _resized
    np.multiply(resize(image, rows, columns), np.float32(2 / 255), out=inside)
    inside -= np.float32(1)
    return result


def _filtered(image: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Resize an image as Pillow does, to [3, rows, columns] from 0 to 255."""
    if image.shape[:2] != (rows, columns):
        resized = Image.fromarray(image).resize((columns, rows), resample=Image.Resampling.BILINEAR)
        image = np.asarray(resized)
    return np.moveaxis(image, 2, 0).astype(np.float32)


def _resized(image: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Resize an image to [3, rows, columns] float32 from 0 to 255.

    Rows become floats after they are chosen: an image that shrinks has few of them.
    """
    if rows == image.shape[0]:
        pixels = image.astype(np.float32)
    else:
        above, below, share = _neighbours(image.shape[0], rows)
        chosen = (np.take(image, each, axis=0).astype(np.float32) for each in (above, below))
        pixels = _mixed(*chosen, share[:, None, None])
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
    scale = np.float32(before) / np.float32(after)
    places = scale * (np.arange(after, dtype=np.float32) + np.float32(0.5)) - np.float32(0.5)
    places = np.maximum(places, np.float32(0))
    first = np.minimum(places.astype(np.int64), before - 1)
    return first, np.minimum(first + 1, before - 1), places - first.astype(np.float32)
