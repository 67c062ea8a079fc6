# SPDX-License-Identifier: Apache-2.0
"""Image files of a request, decoded by OpenCV and libjpeg."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from edgellm_ros.io.contents import contents, silenced_stderr

if TYPE_CHECKING:
    import numpy as np


def read_image(source: str | Path | bytes) -> np.ndarray:
    """Read an image file that OpenCV can decode as RGB uint8 [H, W, 3].

    source: the file, or its contents. Raises ValueError for an unreadable or empty file, and for a damaged
    JPEG file.
    """
    import cv2
    import numpy as np

    from edgellm_ros.multimodal.jpeg import JPEG_START, decode_jpeg

    data, where = contents(source)
    if not data:
        raise ValueError(f"{where}the image file is empty")
    if data.startswith(JPEG_START):
        try:
            return decode_jpeg(data)
        except ValueError as error:
            raise ValueError(f"{where}the JPEG file cannot be decoded ({len(data)} bytes): {error}") from None
    try:
        with silenced_stderr():
            image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    except cv2.error:  # more than 2**30 pixels
        image = None
    if image is None:
        raise ValueError(f"{where}not an image that OpenCV can read ({len(data)} bytes)")
    return cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
