# SPDX-License-Identifier: Apache-2.0
"""Converts sensor_msgs/Image to RGB arrays, without ROS.

Every field of a message is checked before its use. Encodings are those of sensor_msgs/image_encodings.hpp;
OpenCV converts them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np

from edgellm_ros.echo import quoted
from edgellm_ros.ros.node.sensors.image_size import MAX_PIXELS, check_size


@dataclass(frozen=True)
class Encoding:
    """How the pixels of a raw image are stored."""

    channels: int  # numbers per pixel in a row
    conversion: int | None  # OpenCV's code of the conversion to RGB; None = already RGB
    bits: int = 8  # per number
    multiple_of: tuple[int, int] = (1, 1)  # divisors of width and height
    at_least: int = 1  # smallest width and height
    rows: float = 1.0  # rows of data per row of pixels: in NV21, chroma follows luma


def _bayer(conversion: int, bits: int) -> Encoding:
    return Encoding(1, conversion, bits, at_least=3)


# OpenCV names a Bayer pattern by its second row, second and third column; ROS by its first two rows.
_BAYER = {
    "rggb": cv2.COLOR_BayerBG2RGB,
    "bggr": cv2.COLOR_BayerRG2RGB,
    "gbrg": cv2.COLOR_BayerGR2RGB,
    "grbg": cv2.COLOR_BayerGB2RGB,
}
_UYVY = Encoding(2, cv2.COLOR_YUV2RGB_UYVY, multiple_of=(2, 1))
_YUYV = Encoding(2, cv2.COLOR_YUV2RGB_YUY2, multiple_of=(2, 1))
ENCODINGS: dict[str, Encoding] = {
    "rgb8": Encoding(3, None),
    "bgr8": Encoding(3, cv2.COLOR_BGR2RGB),
    "rgba8": Encoding(4, cv2.COLOR_RGBA2RGB),
    "bgra8": Encoding(4, cv2.COLOR_BGRA2RGB),
    "mono8": Encoding(1, cv2.COLOR_GRAY2RGB),
    "rgb16": Encoding(3, None, 16),
    "bgr16": Encoding(3, cv2.COLOR_BGR2RGB, 16),
    "rgba16": Encoding(4, cv2.COLOR_RGBA2RGB, 16),
    "bgra16": Encoding(4, cv2.COLOR_BGRA2RGB, 16),
    "mono16": Encoding(1, cv2.COLOR_GRAY2RGB, 16),
    "uyvy": _UYVY,
    "yuv422": _UYVY,  # the older name
    "yuyv": _YUYV,
    "yuv422_yuy2": _YUYV,
    "nv21": Encoding(1, cv2.COLOR_YUV2RGB_NV21, multiple_of=(2, 2), rows=1.5),
    **{f"bayer_{name}{bits}": _bayer(code, bits) for name, code in _BAYER.items() for bits in (8, 16)},
}


def decode_raw(message: Any, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Return the pixels of a message, RGB uint8 [H, W, 3].

    `message`: of rclpy or of the bag library. ValueError for a message that cannot be decoded, with the field
    and its value.
    """
    encoding = ENCODINGS.get(message.encoding)
    if encoding is None:
        raise ValueError(
            f"image encoding {quoted(message.encoding)} is not supported: use one of {', '.join(ENCODINGS)}"
        )
    height, width, step = message.height, message.width, message.step
    if height == 0 or width == 0 or len(message.data) == 0:
        raise ValueError(f"image is empty: {width} x {height} pixels, {len(message.data)} bytes of data")
    check_size("image", width, height, max_pixels)
    _check_shape(message.encoding, encoding, width, height)
    row = width * encoding.channels * encoding.bits // 8
    if step < row:
        raise ValueError(
            f"image step is {step}, less than a row of {width} {message.encoding} pixels ({row})"
        )
    rows = round(height * encoding.rows)
    if len(message.data) != rows * step:
        problem = "is truncated" if len(message.data) < rows * step else "has too much data"
        raise ValueError(
            f"image {problem}: {len(message.data)} bytes, expected {rows} rows of {step} = {rows * step}"
        )
    data = np.ascontiguousarray(np.frombuffer(message.data, np.uint8).reshape(rows, step)[:, :row])
    if encoding.bits == 16:
        data = data.view(">u2" if message.is_bigendian else "<u2").astype(np.uint16)
    pixels = data.reshape(rows, width, encoding.channels)
    if encoding.conversion is not None:
        pixels = cv2.cvtColor(pixels, encoding.conversion)
    return cv2.convertScaleAbs(pixels, alpha=255 / 65535) if encoding.bits == 16 else pixels


def _check_shape(name: str, encoding: Encoding, width: int, height: int) -> None:
    across, down = encoding.multiple_of
    if width % across or height % down:
        sides = f"a width divisible by {across}" + (f" and a height divisible by {down}" if down > 1 else "")
        raise ValueError(f"image is {width} x {height} pixels: an image in {name} has {sides}")
    if min(width, height) < encoding.at_least:
        raise ValueError(
            f"image is {width} x {height} pixels: {name} needs at least "
            f"{encoding.at_least} x {encoding.at_least}"
        )
