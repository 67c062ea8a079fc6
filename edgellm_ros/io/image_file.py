# SPDX-License-Identifier: Apache-2.0
"""Image files of a request, decoded by OpenCV and libjpeg."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from edgellm_ros.io.contents import contents, silenced_stderr

if TYPE_CHECKING:
    import numpy as np

PNG_START = b"\x89PNG\r\n\x1a\n"
PNG_CHUNK = 12  # bytes of a chunk's length, name and checksum


def read_image(source: str | Path | bytes) -> np.ndarray:
    """Read an image file that OpenCV can decode as RGB uint8 [H, W, 3].

    source: the file, or its contents. Raises ValueError for an unreadable or empty file, for a damaged JPEG
    file, and for a PNG file that is truncated.
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
    _check_png(data, where)
    try:
        with silenced_stderr():
            image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    except cv2.error:  # more than 2**30 pixels
        image = None
    if image is None:
        raise ValueError(f"{where}not an image that OpenCV can read ({len(data)} bytes)")
    return cv2.cvtColor(image, cv2.COLOR_BGR2RGB)


def _check_png(data: bytes, where: str) -> None:
    """Raise ValueError for a PNG file with a chunk that ends after the file.

    OpenCV allocates as many bytes as such a chunk tells, up to 2 GiB.
    """
    start = len(PNG_START)
    while data.startswith(PNG_START) and start + PNG_CHUNK <= len(data):
        size, name = int.from_bytes(data[start : start + 4], "big"), data[start + 4 : start + 8]
        left = len(data) - start - PNG_CHUNK
        if size > left:
            chunk = name.decode("ascii", "replace")
            raise ValueError(f"{where}the PNG file is truncated: {left} bytes of {chunk!r}, expected {size}")
        start += PNG_CHUNK + size
