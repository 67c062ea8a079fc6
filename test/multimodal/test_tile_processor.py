# SPDX-License-Identifier: Apache-2.0
"""Images to tiles with the bits of transformers' GotOcr2ImageProcessorPil."""

import dataclasses

import numpy as np
import pytest

from edgellm_ros.multimodal.tile_processor import TileProcessor, best_tile_grid
from fixtures.pixel_values import pixel_values
from fixtures.reference_inputs import make_image
from fixtures.vision_config import TILES

SIZES = [(64, 64), (65, 63), (100, 300), (301, 97), (480, 640), (31, 500), (1, 1), (7, 900), (900, 7)]
CHANGES = [
    {},
    {"max_tiles": 1},
    {"min_tiles": 5, "max_tiles": 7},
    {"tile_size": 48},
    {"min_tiles": 4, "max_tiles": 3},
    {"rescale_factor": 1 / 127.5, "image_mean": (1.0, 0.9, 1.1)},
]


def as_transformers(patches: np.ndarray, config) -> np.ndarray:
    """Put patches [T,P,C*p*p], merge block by merge block, back into tiles [T,C,h,w]."""
    merge, patch = config.spatial_merge_size, config.patch_size
    side, size = config.tile_size // config.size_factor, config.tile_size
    blocks = patches.reshape(len(patches), side, side, merge, merge, 3, patch, patch)
    return blocks.transpose(0, 5, 1, 3, 6, 2, 4, 7).reshape(len(patches), 3, size, size)


def reference_processor(config):
    pil = pytest.importorskip("transformers.models.got_ocr2.image_processing_pil_got_ocr2")
    return pil.GotOcr2ImageProcessorPil(
        size={"height": config.tile_size, "width": config.tile_size},
        crop_to_patches=True,
        min_patches=config.min_tiles,
        max_patches=config.max_tiles,
        resample=config.resample,
        rescale_factor=config.rescale_factor,
        image_mean=config.image_mean,
        image_std=config.image_std,
    )


@pytest.mark.parity
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_tiles_equal_those_of_transformers(change, size):
    config = dataclasses.replace(TILES, **change)
    image = make_image(*size)
    processor = TileProcessor(config)
    patches = pixel_values(processor, image)
    expected = reference_processor(config)(image, input_data_format="channels_last", return_tensors="np")
    assert patches.dtype == np.float32
    np.testing.assert_array_equal(as_transformers(patches, config), expected["pixel_values"])
    assert processor.token_grid(*size) == (len(patches), config.tile_tokens)


@pytest.mark.parity
def test_the_number_of_tiles_of_any_size_equals_that_of_transformers():
    sizes = np.random.default_rng(0).integers(1, 1500, (1000, 2)).tolist()
    for low, high in [(1, 12), (2, 6), (3, 3), (4, 9)]:
        config = dataclasses.replace(TILES, min_tiles=low, max_tiles=high)
        reference = reference_processor(config)
        for size in sizes:
            assert TileProcessor(config).token_grid(*size)[0] == reference.get_number_of_image_patches(*size)


def test_a_wide_image_becomes_a_row_of_tiles_and_the_whole():
    assert best_tile_grid(40, 120, TILES) == (1, 3)
    assert TileProcessor(TILES).token_grid(40, 120) == (4, 16)


def test_a_large_square_image_gets_more_tiles_than_a_small_one():
    assert best_tile_grid(64, 64, TILES) == (1, 1)
    assert best_tile_grid(640, 640, TILES) == (3, 3)
