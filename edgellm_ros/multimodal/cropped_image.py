# SPDX-License-Identifier: Apache-2.0
"""Resizes camera images for policies, crops their centre, and resizes it again.

References: LeRobot 0.6.1, policies/groot/processor_groot.py; NVIDIA Isaac-GR00T,
gr00t_n1d7/image_augmentations.py.
"""

from __future__ import annotations

import cv2
import numpy as np
from PIL import Image

from edgellm_ros.multimodal.image_crop import BICUBIC, BILINEAR, ImageCrop, Size, crop_steps
from edgellm_ros.multimodal.image_pixels import check_image

PILLOW = {BILINEAR: Image.Resampling.BILINEAR, BICUBIC: Image.Resampling.BICUBIC}  # others are of OpenCV


def cropped_image(crop: ImageCrop, image: np.ndarray) -> np.ndarray:
    """Resize and crop an image [H, W, 3] uint8 -> [h, w, 3] uint8.

    ValueError for another shape or type.
    """
    check_image(image)
    square, resized, kept, last = crop_steps(crop, image.shape[:2])
    if square != image.shape[:2]:
        image = _centred(image, square)
    image = _resized(crop, image, resized)
    top, left = (before - after for before, after in zip(resized, kept, strict=True))
    image = image[top // 2 : top // 2 + kept[0], left // 2 : left // 2 + kept[1]]
    return np.ascontiguousarray(_resized(crop, image, last))


def _centred(image: np.ndarray, size: Size) -> np.ndarray:
    """Put an image in the middle of a black one."""
    result = np.zeros((*size, 3), np.uint8)
    top, left = (size[0] - image.shape[0]) // 2, (size[1] - image.shape[1]) // 2
    result[top : top + image.shape[0], left : left + image.shape[1]] = image
    return result


def _resized(crop: ImageCrop, image: np.ndarray, size: Size) -> np.ndarray:
    if image.shape[:2] == size:
        return image
    height, width = size
    method = PILLOW.get(crop.filter)
    if method is None:
        contiguous = np.ascontiguousarray(image)
        return np.asarray(cv2.resize(contiguous, (width, height), interpolation=cv2.INTER_AREA))
    return np.asarray(Image.fromarray(image).resize((width, height), method))
