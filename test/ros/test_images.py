# SPDX-License-Identifier: Apache-2.0
"""Camera messages to pixels."""

from __future__ import annotations

import struct
import zlib

import cv2
import numpy as np
import pytest
from sensor_msgs.msg import CompressedImage, Image
from std_msgs.msg import Header

from edgellm_ros.ros.node.sensors import compressed_images
from edgellm_ros.ros.node.sensors.image_size import jpeg_size, png_size
from edgellm_ros.ros.node.sensors.images import decode_image, encode_image
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


@pytest.mark.parametrize("padding", [0, 6])
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(
    "encoding, channels",
    [("rgb16", [0, 1, 2]), ("bgr16", [2, 1, 0]), ("rgba16", [0, 1, 2, 0]), ("mono16", [1])],
)
def test_16_bits_of_either_byte_order_are_scaled_to_8(encoding, channels, order, padding):
    deep = np.random.default_rng(1).integers(0, 65536, (6, 8, 3))
    stored = deep[..., channels].astype(f"{order}u2").reshape(6, -1).view(np.uint8)
    rows = np.pad(stored, ((0, 0), (0, padding)))
    message = Image(
        height=6,
        width=8,
        encoding=encoding,
        step=rows.shape[1],
        data=rows.tobytes(),
        is_bigendian=order == ">",
    )
    expected = deep if len(channels) > 1 else deep[..., [1, 1, 1]]
    np.testing.assert_array_equal(decode_image(message), np.rint(expected / 257))


# BT.601 Y, Cb, Cr of studio range, from the recommendation's 8-bit colour bars
YUV_COLORS = {
    "white": ((235, 128, 128), (255, 255, 255)),
    "red": ((81, 90, 240), (255, 0, 0)),
    "green": ((145, 54, 34), (0, 255, 0)),
    "blue": ((41, 240, 110), (0, 0, 255)),
}


@pytest.mark.parametrize("color", YUV_COLORS)
@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("encoding", ["uyvy", "yuv422", "yuyv", "yuv422_yuy2", "nv21"])
def test_yuv_of_the_color_bars_is_their_rgb(encoding, padding, color):
    (y, u, v), rgb = YUV_COLORS[color]
    if encoding == "nv21":
        rows = np.concatenate([np.full((4, 8), y, np.uint8), np.tile(np.uint8([v, u]), (2, 4))])
    else:
        rows = np.tile(np.uint8([u, y, v, y] if encoding in ("uyvy", "yuv422") else [y, u, y, v]), (4, 4))
    rows = np.pad(rows, ((0, 0), (0, padding)))
    message = Image(height=4, width=8, encoding=encoding, step=rows.shape[1], data=rows.tobytes())
    pixels = decode_image(message)
    assert pixels.shape == (4, 8, 3)
    assert np.abs(pixels.astype(int) - rgb).max() <= 2


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("pattern", ["rggb", "bggr", "gbrg", "grbg"])
def test_bayer_patterns_give_the_colors_back(pattern, bits):
    color = np.uint8([[[200, 90, 20]]])
    scene = np.tile(color, (8, 10, 1)).astype(np.uint8 if bits == 8 else np.uint16) * (
        1 if bits == 8 else 257
    )
    mosaic = np.empty((8, 10), scene.dtype)
    for place, letter in enumerate(pattern):
        row, column = divmod(place, 2)
        mosaic[row::2, column::2] = scene[row::2, column::2, "rgb".index(letter)]
    step = mosaic.shape[1] * bits // 8
    message = Image(height=8, width=10, encoding=f"bayer_{pattern}{bits}", step=step, data=mosaic.tobytes())
    np.testing.assert_array_equal(decode_image(message), np.tile(color, (8, 10, 1)))


@pytest.mark.parametrize(
    "fields, words",
    [
        (
            {"encoding": "yuyv", "width": 7, "step": 14},
            "7 x 4 pixels: an image in yuyv has a width divisible by 2$",
        ),
        (
            {"encoding": "nv21", "height": 3, "step": 8},
            "8 x 3 pixels: an image in nv21 has a width divisible by 2 and a height divisible by 2$",
        ),
        (
            {"encoding": "bayer_rggb8", "width": 2, "step": 2},
            "2 x 4 pixels: bayer_rggb8 needs at least 3 x 3",
        ),
        ({"encoding": "mono16", "step": 15}, r"image step is 15, less than a row of 8 mono16 pixels \(16\)"),
        ({"encoding": "nv24", "step": 8}, "image encoding 'nv24' is not supported"),
        (
            {"encoding": "mono8", "width": 65500, "height": 65500, "step": 65500},
            "65500 x 65500 pixels, at most",
        ),
    ],
)
def test_raw_images_of_an_impossible_shape_are_errors(fields, words):
    message = Image(**{"height": 4, "width": 8, "data": bytes(48), **fields})
    with pytest.raises(ValueError, match=words):
        decode_image(message)


def claim_size(data: bytes, extension: str, width: int, height: int) -> bytes:
    """The file with another size in its header."""
    if extension == ".png":
        header = b"IHDR" + struct.pack(">II", width, height) + data[24:29]
        return data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]
    start = data.index(b"\xff\xc0") + 5
    return data[:start] + struct.pack(">HH", height, width) + data[start + 4 :]


@pytest.mark.parametrize("size", [(65500, 65500), (32767, 32767)])
@pytest.mark.parametrize("extension", [".jpg", ".png"])
def test_a_file_that_claims_a_huge_size_is_an_error_before_it_is_decoded(extension, size, monkeypatch):
    data = claim_size(encoded(extension), extension, *size)
    monkeypatch.setattr(cv2, "imdecode", lambda *_: pytest.fail("decoded"))
    monkeypatch.setattr(compressed_images, "decode_jpeg", lambda *_: pytest.fail("decoded"))
    with pytest.raises(ValueError, match=f"is {size[0]} x {size[1]} pixels, at most 67108864"):
        decode_image(CompressedImage(format="x", data=data))


@pytest.mark.parametrize("extension", [".jpg", ".png"])
def test_the_size_in_a_files_header_is_found(extension):
    read_size = jpeg_size if extension == ".jpg" else png_size
    assert read_size(encoded(extension)) == (160, 120)


def test_the_size_of_a_jpeg_is_found_behind_comments_and_fill_bytes():
    data = encoded(".jpg")
    comment = b"\xff\xfe" + struct.pack(">H", 12) + b"\xff\xc0\x00\x11\x08" + bytes(5)
    assert jpeg_size(data[:2] + comment + b"\xff\xff" + data[2:]) == (160, 120)
    assert jpeg_size(data[:2]) is None


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


def test_a_jpeg_that_is_damaged_inside_is_an_error():
    """Half of it zeros, with a valid end: libjpeg would fill the rest with grey."""
    data = encoded(".jpg")
    half = len(data) // 2
    damaged = data[:half] + bytes(len(data) - half - 2) + b"\xff\xd9"
    with pytest.raises(ValueError, match=r"cannot be decoded: Corrupt JPEG data: premature end"):
        decode_image(CompressedImage(format="jpeg", data=damaged))


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
