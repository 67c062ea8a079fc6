# SPDX-License-Identifier: Apache-2.0
"""Resizes camera images as openpi's clients do: bilinear, black at both sides.

The aspect ratio is kept. Source: openpi-client 0.1.2, image_tools.py, resize_with_pad.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

from edgellm_ros.multimodal.image_pixels import check_image


def fitted_size(image: np.ndarray, height: int, width: int) -> tuple[int, int]:
    """Return the height and width with which an image [H, W, 3] fits.

    The aspect ratio is kept, and each side has at least one pixel.
    """
    ratio = max(image.shape[1] / width, image.shape[0] / height)
    return max(int(image.shape[0] / ratio), 1), max(int(image.shape[1] / ratio), 1)


def centred_image(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize an image [H, W, 3] uint8 to fit into [height, width, 3] uint8.

    ValueError for another shape or type.
    """
    check_image(image)
    if image.shape[:2] == (height, width):
        return image
    rows, columns = fitted_size(image, height, width)
    result = np.zeros((height, width, 3), np.uint8)
    top, left = (height - rows) // 2, (width - columns) // 2
    resized = Image.fromarray(image).resize((columns, rows), Image.Resampling.BILINEAR)
    result[top : top + rows, left : left + columns] = resized
    return result
