# SPDX-License-Identifier: Apache-2.0
"""The size limit of images, and the size in the header of an image file."""

from __future__ import annotations

import struct

from edgellm_ros.multimodal.jpeg import JPEG_START

MAX_PIXELS = 2**26  # 67 million pixels are 201 MB as RGB; an 8K camera has 33 million
PNG_START = b"\x89PNG\r\n\x1a\n"
# Markers of a JPEG frame header (SOF0 to SOF15); C4, C8 and CC are tables or reserved.
_FRAME_HEADERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_WITHOUT_LENGTH = frozenset((0x01, *range(0xD0, 0xD9)))  # TEM, RST0 to RST7, SOI


def check_size(name: str, width: int, height: int, max_pixels: int = MAX_PIXELS) -> None:
    """Raise ValueError if an image has more than `max_pixels` pixels."""
    if width * height > max_pixels:
        raise ValueError(
            f"{name} is {width} x {height} pixels, at most {max_pixels} pixels are decoded (in the node: "
            "parameter limits.image_pixels)"
        )


def jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Return width and height from the frame header of a JPEG file (ITU T.81, B.2).

    None for a file without frame header.
    """
    at = len(JPEG_START)
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # fill byte
            at += 1
        elif marker in _WITHOUT_LENGTH:
            at += 2
        elif marker in _FRAME_HEADERS:
            if at + 9 > len(data):
                return None
            height, width = struct.unpack_from(">HH", data, at + 5)
            return width, height
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return None


def png_size(data: bytes) -> tuple[int, int] | None:
    """Return width and height from the first chunk of a PNG file (PNG 11.2.2).

    None if the first chunk is not an IHDR.
    """
    if len(data) < 24 or data[12:16] != b"IHDR":
        return None
    width, height = struct.unpack_from(">II", data, 16)
    return width, height
