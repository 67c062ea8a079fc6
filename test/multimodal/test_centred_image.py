# SPDX-License-Identifier: Apache-2.0
"""Images resized as openpi's clients do."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm_ros.multimodal.centred_image import centred_image


@pytest.mark.parametrize(
    ("size", "rows", "columns"),
    [
        ((480, 640), slice(28, 196), slice(0, 224)),
        ((640, 480), slice(0, 224), slice(28, 196)),
        ((100, 100), slice(0, 224), slice(0, 224)),
        ((3, 500), slice(111, 112), slice(0, 224)),
    ],
)
def test_the_image_is_in_the_middle_and_the_rest_is_black(size, rows, columns):
    found = centred_image(np.full((*size, 3), (10, 200, 90), np.uint8), 224, 224)
    assert (found.shape, found.dtype) == ((224, 224, 3), np.uint8)
    assert (found[rows, columns] == (10, 200, 90)).all()
    found[rows, columns] = 0
    assert not found.any()


def test_an_image_of_this_size_is_not_changed():
    image = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    assert centred_image(image, 24, 32) is image


def test_pixels_are_means_of_those_that_they_cover():
    image = np.zeros((4, 4, 3), np.uint8)
    image[:, 2:] = 200
    found = centred_image(image, 2, 2)[0, :, 0]
    assert found.tolist() == [
        29,
        171,
    ]  # weights 1/8, 3/8, 3/8, 1/8 of bilinear with a filter, cut at the edge


def test_what_is_no_image_is_refused():
    with pytest.raises(ValueError, match="uint8"):
        centred_image(np.zeros((4, 4, 3)), 2, 2)
