# SPDX-License-Identifier: Apache-2.0
"""sensor_msgs images to RGB arrays and back, every claim of the message checked before it is believed."""

from __future__ import annotations

import cv2
import numpy as np
from sensor_msgs.msg import CompressedImage, Image
from std_msgs.msg import Header

# Channels in the message, and how OpenCV turns them into RGB (None: they are RGB).
ENCODINGS: dict[str, tuple[int, int | None]] = {
    "rgb8": (3, None),
    "bgr8": (3, cv2.COLOR_BGR2RGB),
    "rgba8": (4, cv2.COLOR_RGBA2RGB),
    "bgra8": (4, cv2.COLOR_BGRA2RGB),
    "mono8": (1, cv2.COLOR_GRAY2RGB),
}
JPEG_START, JPEG_END = b"\xff\xd8", b"\xff\xd9"
PNG_START, PNG_END = b"\x89PNG", b"IEND"


def decode_image(message: Image | CompressedImage) -> np.ndarray:
    """RGB uint8 [H, W, 3] of a camera message. ValueError says what is wrong with the message."""
    return _decode_compressed(message) if isinstance(message, CompressedImage) else _decode_raw(message)


def encode_image(image: np.ndarray, header: Header) -> Image:
    """The message of an RGB uint8 array [H, W, 3]."""
    height, width, _ = image.shape
    # bytes: rclpy takes them as they are, while it would check an array element by element
    return Image(
        header=header, height=height, width=width, encoding="rgb8", step=3 * width, data=image.tobytes()
    )


def _decode_raw(message: Image) -> np.ndarray:
    if message.encoding not in ENCODINGS:
        raise ValueError(
            f"image encoding {message.encoding!r} is not supported; use one of {', '.join(ENCODINGS)}"
        )
    channels, conversion = ENCODINGS[message.encoding]
    height, width, step = message.height, message.width, message.step
    if height == 0 or width == 0 or len(message.data) == 0:
        raise ValueError(f"image is empty: {width} x {height} pixels, {len(message.data)} bytes of data")
    if step < width * channels:
        raise ValueError(
            f"image step is {step}, less than a row of {width} {message.encoding} pixels ({width * channels})"
        )
    if len(message.data) != height * step:
        problem = "is truncated" if len(message.data) < height * step else "has too much data"
        raise ValueError(
            f"image {problem}: {len(message.data)} bytes, expected {height} rows of {step} = {height * step}"
        )
    rows = np.frombuffer(message.data, np.uint8).reshape(height, step)[:, : width * channels]
    pixels = np.ascontiguousarray(rows).reshape(height, width, channels)
    return pixels if conversion is None else cv2.cvtColor(pixels, conversion)


def _decode_compressed(message: CompressedImage) -> np.ndarray:
    data = bytes(message.data)
    if not data:
        raise ValueError("compressed image is empty")
    # OpenCV fills what a truncated file lacks with grey: look for the end ourselves.
    if data.startswith(JPEG_START):
        complete = data.rstrip(b"\0").endswith(JPEG_END)
    elif data.startswith(PNG_START):
        complete = PNG_END in data[-12:]
    else:
        raise ValueError(f"compressed image (format {message.format!r}) is neither JPEG nor PNG")
    if not complete:
        raise ValueError(
            f"compressed image (format {message.format!r}) is truncated: {len(data)} bytes without an end"
        )
    pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    if pixels is None:
        raise ValueError(f"compressed image (format {message.format!r}, {len(data)} bytes) cannot be decoded")
    return cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)
