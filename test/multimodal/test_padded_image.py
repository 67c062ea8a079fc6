# SPDX-License-Identifier: Apache-2.0
"""Images of a policy: bilinear, filled up to a square.

test/parity compares them with LeRobot's code.
"""

from __future__ import annotations

import numpy as np
import pytest

from edgellm_ros.multimodal.padded_image import padded_image


def bilinear(image: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Resize pixel by pixel: a pixel's centre lies between four pixels of the image."""
    height, width = image.shape[:2]
    result = np.empty((rows, columns, 3))
    for row in range(rows):
        y = max((row + 0.5) * height / rows - 0.5, 0.0)
        top, bottom = int(y), min(int(y) + 1, height - 1)
        for column in range(columns):
            x = max((column + 0.5) * width / columns - 0.5, 0.0)
            left, right = int(x), min(int(x) + 1, width - 1)
            above = image[top, left] * (1 - x % 1) + image[top, right] * (x % 1)
            below = image[bottom, left] * (1 - x % 1) + image[bottom, right] * (x % 1)
            result[row, column] = above * (1 - y % 1) + below * (y % 1)
    return result


@pytest.mark.parametrize(
    ("size", "inside"), [((12, 16), (24, 32)), ((50, 40), (32, 25)), ((32, 32), (32, 32))]
)
def test_the_image_lies_at_the_right_and_bottom_edge(size, inside):
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    found = padded_image(image, 32)
    rows, columns = inside
    expected = bilinear(image, rows, columns) / 127.5 - 1
    np.testing.assert_allclose(np.moveaxis(found, 0, 2)[32 - rows :, 32 - columns :], expected, atol=1e-5)
    assert (found[:, : 32 - rows] == -1).all()
    assert (found[:, :, : 32 - columns] == -1).all()


def test_a_picture_of_another_type_is_refused():
    with pytest.raises(ValueError, match="an image must be a uint8 array"):
        padded_image(np.zeros((4, 4, 3), np.float32), 32)
