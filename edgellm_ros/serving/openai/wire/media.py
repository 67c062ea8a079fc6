# SPDX-License-Identifier: Apache-2.0
"""Readers of the images, videos and sounds of one request, within limits."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import TYPE_CHECKING

from edgellm_ros.io.contents import contents
from edgellm_ros.io.image_file import read_image
from edgellm_ros.messages.content_parts import FileReaders
from edgellm_ros.messages.engine_readers import file_readers
from edgellm_ros.serving.openai.limits import Limits

if TYPE_CHECKING:
    import numpy as np

    from edgellm_ros.engine_directory.config import EngineConfig

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def limited_readers(config: EngineConfig, limits: Limits) -> FileReaders:
    """Return readers of what is in the request itself, for one request."""
    return dataclasses.replace(file_readers("this engine", config), image=_LimitedImages(limits))


class _LimitedImages:
    """Reads the images of one request, after a look at their sizes."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._count = 0

    def __call__(self, source: Path | bytes) -> np.ndarray:
        """Read an image as RGB uint8 [H, W, 3].

        ValueError for one that is no image, too large, or one too many.
        """
        data, _ = contents(source)
        self._count += 1
        if self._count > self._limits.max_images:
            raise ValueError(f"a request has at most {self._limits.max_images} images")
        if not data:
            raise ValueError("the image file is empty")
        width, height = _size(data)
        if width * height > self._limits.max_pixels:
            raise ValueError(
                f"an image has at most {self._limits.max_pixels} pixels, this one has {width}x{height}"
            )
        return read_image(data)


def _size(data: bytes) -> tuple[int, int]:
    """Return width and height, without decoding."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return image.size
    except Exception:  # Pillow's readers raise errors of many kinds
        expected = ", ".join(FORMATS[:-1])
        raise ValueError(
            f"not an image in {expected} or {FORMATS[-1]} ({len(data)} bytes), or one of too many pixels"
        ) from None
