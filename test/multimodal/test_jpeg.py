# SPDX-License-Identifier: Apache-2.0
"""JPEG files: intact ones have OpenCV's pixels, damaged ones are refused."""

from __future__ import annotations

import io
import sys

import cv2
import numpy as np
import pytest
from PIL import Image

from edgellm_ros.engine.errors import EngineError
from edgellm_ros.multimodal.jpeg import decode_jpeg

SIZES = [(97, 131), (1, 1), (224, 320)]  # height, width


def pixels(height: int, width: int) -> np.ndarray:
    """A smooth picture with some noise."""
    rng = np.random.default_rng(height)
    coarse = rng.integers(0, 256, (height // 16 + 2, width // 16 + 2, 3), np.uint8)
    return cv2.resize(coarse, (width, height), interpolation=cv2.INTER_LINEAR) // 2 + rng.integers(
        0, 64, (height, width, 3), np.uint8
    )


def by_pillow(image: np.ndarray, mode: str = "RGB", **options) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).convert(mode).save(file, "JPEG", **options)
    return file.getvalue()


def by_opencv(image: np.ndarray, *options: int) -> bytes:
    return cv2.imencode(".jpg", image, options)[1].tobytes()


def by_simplejpeg(image: np.ndarray, **options) -> bytes:
    from simplejpeg import encode_jpeg

    return encode_jpeg(image, **options)


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def without_tables(data: bytes) -> bytes:
    """As the frames of MJPEG cameras, which have the default Huffman tables."""
    at, kept = 2, data[:2]
    while data[at + 1] != 0xDA:
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        kept += b"" if data[at + 1] == 0xC4 else data[at:end]
        at = end
    return kept + data[at:]


ENCODERS = {
    **{f"pillow, subsampling {n}": lambda p, n=n: by_pillow(p, subsampling=n) for n in (0, 1, 2)},
    **{f"pillow, quality {n}": lambda p, n=n: by_pillow(p, quality=n) for n in (5, 100)},
    "pillow, progressive": lambda p: by_pillow(p, progressive=True),
    "pillow, optimized": lambda p: by_pillow(p, optimize=True),
    "pillow, restart markers": lambda p: by_pillow(p, restart_marker_rows=1),
    "pillow, gray": lambda p: by_pillow(p, "L"),
    "pillow, RGB": lambda p: by_pillow(p, keep_rgb=True),
    "pillow, CMYK": lambda p: by_pillow(p, "CMYK"),
    **{f"pillow, turned {n}": lambda p, n=n: by_pillow(p, exif=turned(n)) for n in range(1, 9)},
    "opencv": by_opencv,
    "opencv, progressive": lambda p: by_opencv(p, cv2.IMWRITE_JPEG_PROGRESSIVE, 1),
    "opencv, 4:1:1": lambda p: by_opencv(p, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, 0x411111),
    "opencv, gray": lambda p: by_opencv(p[..., 1]),
    "simplejpeg": lambda p: by_simplejpeg(p, quality=90),
    "no Huffman tables": lambda p: without_tables(by_pillow(p)),
    "padded before the end": lambda p: (data := by_pillow(p))[:-2] + bytes(5) + data[-2:],
    "padded behind the end": lambda p: by_pillow(p) + bytes(100),
    "another JFIF revision": lambda p: (data := by_pillow(p))[:11] + b"\2" + data[12:],
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("encoder", ENCODERS)
def test_an_intact_file_has_opencvs_pixels(encoder, size):
    data = ENCODERS[encoder](pixels(*size))
    expected = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    np.testing.assert_array_equal(decode_jpeg(data), cv2.cvtColor(expected, cv2.COLOR_BGR2RGB))


@pytest.mark.parametrize("encode", [by_pillow, lambda p: by_pillow(p, progressive=True), by_opencv])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
def test_zeros_before_a_valid_end_are_refused(encode, share):
    data = encode(pixels(224, 320))
    intact = int(len(data) * share)
    with pytest.raises(ValueError, match="Corrupt JPEG data"):
        decode_jpeg(data[:intact] + bytes(len(data) - intact - 2) + b"\xff\xd9")


def test_a_part_that_is_missing_before_a_valid_end_is_refused():
    data = by_pillow(pixels(224, 320))
    with pytest.raises(ValueError, match="Corrupt JPEG data: premature end of data segment"):
        decode_jpeg(data[: len(data) // 2] + b"\xff\xd9")


def test_bytes_of_another_file_inside_are_refused():
    data, noise = by_pillow(pixels(224, 320)), np.random.default_rng(2).bytes(2000)
    middle = len(data) // 2
    with pytest.raises(ValueError, match="Corrupt JPEG data"):
        decode_jpeg(data[:middle] + noise + data[middle + 2000 :])


@pytest.mark.parametrize("data", [b"", b"\xff\xd8\xff\xd9", by_pillow(pixels(97, 131))[:500]])
def test_what_is_no_whole_file_is_refused(data):
    with pytest.raises(ValueError, match=r"Premature end|no image|Could not determine"):
        decode_jpeg(data)


def test_a_missing_package_is_named_with_its_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    with pytest.raises(EngineError, match=r"no JPEG decoder .*: pip install simplejpeg==1\.9\.0"):
        decode_jpeg(b"\xff\xd8\xff\xd9")
