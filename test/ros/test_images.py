# SPDX-License-Identifier: Apache-2.0
"""Camera messages to pixels."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
from sensor_msgs.msg import CompressedImage, Image
from std_msgs.msg import Header

from edgellm_ros.ros.node.images import decode_image, encode_image
from fixtures.peer import image_message

RGB = np.random.default_rng(0).integers(0, 256, (6, 8, 3), np.uint8)
ALPHA = np.full((6, 8, 1), 77, np.uint8)
GREY = cv2.cvtColor(RGB, cv2.COLOR_RGB2GRAY)


@pytest.mark.parametrize(
    "encoding, pixels, expected",
    [
        ("rgb8", RGB, RGB),
        ("bgr8", RGB[..., ::-1], RGB),
        ("rgba8", np.concatenate([RGB, ALPHA], 2), RGB),
        ("bgra8", np.concatenate([RGB[..., ::-1], ALPHA], 2), RGB),
        ("mono8", GREY[..., None], np.repeat(GREY[..., None], 3, 2)),
    ],
)
@pytest.mark.parametrize("padding", [0, 5])
def test_encodings_with_and_without_padded_rows(encoding, pixels, expected, padding):
    rows = np.pad(pixels.reshape(6, -1), ((0, 0), (0, padding)))
    message = Image(height=6, width=8, encoding=encoding, step=rows.shape[1], data=rows.tobytes())
    np.testing.assert_array_equal(decode_image(message), expected)


def test_encode_is_the_inverse_of_decode():
    header = Header(frame_id="camera")
    message = encode_image(RGB, header)
    assert message == image_message(RGB)
    np.testing.assert_array_equal(decode_image(message), RGB)


def test_too_much_data_is_an_error():
    message = image_message(RGB)
    message.data = message.data.tobytes() + b"\0"
    with pytest.raises(ValueError, match="image has too much data: 145 bytes, expected 6 rows of 24 = 144"):
        decode_image(message)


def encoded(extension: str) -> bytes:
    smooth = cv2.resize(RGB, (160, 120))
    return cv2.imencode(extension, smooth[..., ::-1])[1].tobytes()


def test_compressed_png_is_exact():
    pixels = decode_image(CompressedImage(format="png", data=encoded(".png")))
    np.testing.assert_array_equal(pixels, cv2.resize(RGB, (160, 120)))


def test_compressed_jpeg_is_close_and_in_rgb_order():
    pixels = decode_image(CompressedImage(format="rgb8; jpeg compressed bgr8", data=encoded(".jpg")))
    assert np.abs(pixels.astype(int) - cv2.resize(RGB, (160, 120))).mean() < 12


@pytest.mark.parametrize("extension", [".jpg", ".png"])
def test_truncated_file_is_an_error(extension):
    data = encoded(extension)
    with pytest.raises(ValueError, match="is truncated"):
        decode_image(CompressedImage(format=extension[1:], data=data[: len(data) // 2]))


@pytest.mark.parametrize(
    "data, message",
    [
        (b"", "compressed image is empty"),
        (b"GIF89a", r"\(format 'x'\) is neither JPEG nor PNG"),
        (b"\xff\xd8\xff\xd9", "cannot be decoded"),
        (b"\x89PNG\r\n\x1a\nIEND\xaeB`\x82", "cannot be decoded"),
    ],
)
def test_what_is_no_image_is_an_error(data, message):
    with pytest.raises(ValueError, match=message):
        decode_image(CompressedImage(format="x", data=data))
