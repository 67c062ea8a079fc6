# SPDX-License-Identifier: Apache-2.0
"""Converts JPEG and PNG files to RGB arrays.

Size and completeness are checked before decoding, what a JPEG file holds while it is decoded.
"""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np

from edgellm_ros.echo import quoted
from edgellm_ros.multimodal.jpeg import JPEG_START, decode_jpeg
from edgellm_ros.ros.node.sensors.image_size import MAX_PIXELS, PNG_START, check_size, jpeg_size, png_size

JPEG_END, PNG_END = b"\xff\xd9", b"IEND"


def decode_file(content: Any, file_format: str, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Return the pixels of an image file, RGB uint8 [H, W, 3].

    `content` is a buffer of bytes; `file_format` only appears in errors. ValueError for an empty, truncated,
    too large or damaged file.
    """
    data = bytes(content)
    name = f"compressed image (format {quoted(file_format)})"
    if not data:
        raise ValueError("compressed image is empty")
    if data.startswith(JPEG_START):
        complete, size = data.rstrip(b"\0").endswith(JPEG_END), jpeg_size(data)
    elif data.startswith(PNG_START):
        complete, size = PNG_END in data[-12:], png_size(data)
    else:
        raise ValueError(f"{name} is neither JPEG nor PNG")
    if size is not None:
        check_size(name, *size, max_pixels)
    if not complete:
        raise ValueError(f"{name} is truncated: {len(data)} bytes without an end")
    try:
        if size is None:
            raise ValueError("no size in its header")
        return decode_jpeg(data) if data.startswith(JPEG_START) else _decode_png(data)
    except ValueError as error:
        raise ValueError(f"{name}, {len(data)} bytes, cannot be decoded: {error}") from None


def _decode_png(data: bytes) -> np.ndarray:
    try:
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    except cv2.error:  # raised for some damaged files; others decode to None
        pixels = None
    if pixels is None:
        raise ValueError("no PNG image")
    return cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)
