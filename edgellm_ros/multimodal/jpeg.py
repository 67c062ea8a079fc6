# SPDX-License-Identifier: Apache-2.0
"""JPEG files to RGB arrays; files that libjpeg finds damaged are refused.

libjpeg fills what it cannot decode with grey and warns. OpenCV and Pillow drop the warning, simplejpeg raises
it as an error. Pixels are those of OpenCV, bit for bit, as both use libjpeg-turbo.
"""

from __future__ import annotations

import re

import numpy as np

JPEG_START = b"\xff\xd8"
EXIF = b"Exif\0"
# Warnings about intact pixels: headers that some cameras write, and their padding before the end marker.
INTACT = re.compile(
    r"Unknown Adobe color transform code|Warning: unknown JFIF revision"
    r"|Invalid SOS parameters for sequential JPEG|Corrupt JPEG data: \d extraneous bytes before marker 0xd9"
)


def decode_jpeg(data: bytes) -> np.ndarray:
    """Return the pixels of a JPEG file, RGB uint8 [H, W, 3].

    The picture is turned as its Exif data say. ValueError with the reason for a damaged, truncated or
    unsupported file; EngineError if the package simplejpeg is not installed.
    """
    try:
        import simplejpeg
    except ImportError as error:
        from edgellm_ros.engine.errors import EngineError

        raise EngineError(f"no JPEG decoder ({error}): pip install simplejpeg==1.9.0") from None
    try:
        pixels = simplejpeg.decode_jpeg(data, "RGB")
    except ValueError as error:
        if not INTACT.search(str(error)):
            raise ValueError(str(error)) from None
        return _decode_with_opencv(data)
    return _decode_with_opencv(data) if EXIF in data else pixels


def _decode_with_opencv(data: bytes) -> np.ndarray:
    """Decode an intact file in spite of warnings, turned by its Exif data."""
    import cv2

    pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    if pixels is None:
        raise ValueError("OpenCV cannot decode it")
    return cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)
