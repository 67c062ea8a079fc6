# SPDX-License-Identifier: Apache-2.0
"""Resizes camera images for policies: bilinear, filled up to a square.

The aspect ratio is kept.

Reference: LeRobot 0.4.4, modeling_smolvla.py, resize_with_pad and SmolVLAPolicy.prepare_images;
modeling_pi05.py, resize_with_pad_torch.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

from edgellm_ros.kernels.bilinear import Placement, resized, write_placed
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
    where = placement(image, size, centred)
    resize = _filtered if filtered else resized
    result = np.empty((3, size, size), np.float32)
    write_placed(resize(image, where.rows, where.columns), where, fill, result)
    return result


def placement(image: np.ndarray, size: int, centred: bool) -> Placement:
    """Return where `padded_image` places an image."""
    rows, columns = fitted_size(image, size, size)
    top, left = size - rows, size - columns
    if centred:
        top, left = top // 2, left // 2
    return Placement(rows, columns, top, left)


def _filtered(image: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Resize an image as Pillow does, to [3, rows, columns] from 0 to 255."""
    if image.shape[:2] != (rows, columns):
        resized = Image.fromarray(image).resize((columns, rows), resample=Image.Resampling.BILINEAR)
        image = np.asarray(resized)
    return np.moveaxis(image, 2, 0).astype(np.float32)
