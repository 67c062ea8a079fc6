# SPDX-License-Identifier: Apache-2.0
"""Converts camera messages to RGB arrays and back."""

from __future__ import annotations

import numpy as np
from sensor_msgs.msg import CompressedImage, Image
from std_msgs.msg import Header

from edgellm_ros.ros.node.sensors.compressed_images import decode_file
from edgellm_ros.ros.node.sensors.image_size import MAX_PIXELS
from edgellm_ros.ros.node.sensors.raw_images import decode_raw


def decode_image(message: Image | CompressedImage, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Return the pixels of a camera message, RGB uint8 [H, W, 3].

    ValueError for a message that cannot be decoded or has more than `max_pixels` pixels, with the field and
    its value.
    """
    if isinstance(message, CompressedImage):
        return decode_file(message.data, message.format, max_pixels)
    return decode_raw(message, max_pixels)


def encode_image(image: np.ndarray, header: Header) -> Image:
    """Make the message of an RGB uint8 array [H, W, 3]."""
    height, width, _ = image.shape
    # rclpy accepts bytes unchecked; it would check an array element by element.
    return Image(
        header=header, height=height, width=width, encoding="rgb8", step=3 * width, data=image.tobytes()
    )
