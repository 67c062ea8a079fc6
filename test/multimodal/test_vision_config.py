# SPDX-License-Identifier: Apache-2.0
import dataclasses

import pytest

from fixtures.vision_config import CONFIG, TILES


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depth": 0}, "depth must be at least 1, got 0"),
        ({"in_channels": 4}, "in_channels must be 3"),
        ({"max_pixels": 100}, "max_pixels 100 is less than min_pixels 71680"),
        ({"num_position_embeddings": 500}, "must be a square, got 500"),
        ({"num_heads": 5}, "hidden_size 192 / num_heads 5"),
        ({"resample": 2}, r"resample must be 3 \(bicubic\), got 2"),
        ({"image_std": (0.5, 0.5)}, "image_std must have 3 values"),
        ({"image_std": (0.5, 0.5, 0.0)}, "image_std must be positive"),
        ({"deepstack_visual_indexes": (1, 6)}, "outside 0..5"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_it(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


def test_sizes_that_follow():
    assert (CONFIG.grid_side, CONFIG.head_dim, CONFIG.patch_dim) == (24, 64, 768)
    assert (CONFIG.patches_per_token, CONFIG.size_factor) == (4, 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tile_size": 72}, "tile_size must be a multiple of 16 pixels, got 72"),
        ({"min_tiles": 0}, "min_tiles must be at least 1, got 0"),
        ({"max_tiles": 0}, "max_tiles must be at least 1, got 0"),
        ({"num_heads": 5}, "hidden_size 48 / num_heads 5"),
    ],
)
def test_a_wrong_value_for_tiles_is_an_error_that_names_it(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TILES, **change)


def test_sizes_that_follow_for_tiles():
    assert (TILES.tile_tokens, TILES.tile_patches, TILES.patch_dim) == (16, 64, 192)
    assert TILES.pixels_shape(40) == (2, 64, 192)
