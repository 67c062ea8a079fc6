# SPDX-License-Identifier: Apache-2.0
"""Frames to patches with the bits of transformers' Qwen2VLImageProcessorPil."""

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from edgellm_ros.multimodal.image_pixels import check_image
from edgellm_ros.multimodal.patch_processor import PatchProcessor, smart_resize
from edgellm_ros.multimodal.vision_config import Qwen3VisionConfig
from fixtures.pixel_values import pixel_values
from fixtures.reference_inputs import make_image
from fixtures.vision_config import CONFIG, EAGLE

REFERENCES = json.loads((Path(__file__).parents[1] / "data" / "transformers_references.json").read_text())


def within(low: int, high: int) -> Qwen3VisionConfig:
    return dataclasses.replace(CONFIG, min_pixels=low, max_pixels=high)


def as_transformers(pixel_values: np.ndarray, patch: int) -> np.ndarray:
    """Repeat patches [P,C*p*p] for all frames: [P,C*T*p*p], the form of transformers."""
    frames = pixel_values.reshape(len(pixel_values), 3, 1, patch, patch)
    return frames.repeat(CONFIG.temporal_patch_size, axis=2).reshape(len(pixel_values), -1)


@pytest.mark.parametrize("reference", REFERENCES["images"], ids=lambda r: f"{r['size']}-{r['bounds']}")
def test_patches_equal_recorded_ones_of_transformers(reference):
    processor = PatchProcessor(within(*reference["bounds"]))
    values = pixel_values(processor, make_image(*reference["size"]))
    assert [2 * side for side in processor.token_grid(*reference["size"])] == reference["grid"]
    assert values.dtype == np.float32
    repeated = as_transformers(values, CONFIG.patch_size)
    digest = hashlib.sha256(repeated.astype("<f4").tobytes()).hexdigest()
    assert digest == reference["sha256"]


@pytest.mark.parity
@pytest.mark.parametrize("size", [(224, 320), (225, 321), (768, 1024), (31, 65), (1080, 1920)])
@pytest.mark.parametrize("patch", [14, 16])
def test_patches_equal_those_of_transformers_where_it_is_installed(size, patch):
    pil = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    config = dataclasses.replace(within(50_000, 200_000), patch_size=patch)
    reference = pil.Qwen2VLImageProcessorPil(
        size={"shortest_edge": 50_000, "longest_edge": 200_000},
        patch_size=patch,
        image_mean=CONFIG.image_mean,
        image_std=CONFIG.image_std,
    )
    image = make_image(*size)
    expected = reference(image, return_tensors="np")["pixel_values"]
    patches = as_transformers(pixel_values(PatchProcessor(config), image), patch)
    np.testing.assert_array_equal(patches, expected)


def test_sizes_are_multiples_of_patch_times_merge_within_the_bounds():
    for height, width in np.random.default_rng(0).integers(20, 2000, (200, 2)).tolist():
        resized = smart_resize(height, width, within(10_000, 300_000))
        assert all(side % 32 == 0 and side > 0 for side in resized)
        assert 10_000 <= resized[0] * resized[1] <= 300_000


@pytest.mark.parametrize(
    ("size", "resized"),
    [
        ((256, 256), (252, 252)),
        ((256, 341), (252, 336)),
        ((42, 42), (56, 56)),  # halves to even numbers
        ((10, 10), (56, 56)),  # at least four tokens
        ((20, 400), (28, 392)),
        ((3000, 3000), (1792, 1792)),  # at most 4096
        ((2010, 1610), (1988, 1596)),
        ((9000, 100), (7000, 112)),  # the longest side
    ],
)
def test_sizes_of_siglip_2_are_those_of_eagle_s_processor(size, resized):
    assert smart_resize(*size, EAGLE) == resized


def test_an_image_that_is_too_long_is_an_error():
    with pytest.raises(ValueError, match="factor of at most 200, got 1000x4"):
        smart_resize(4, 1000, CONFIG)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((8, 8, 3), np.float32), r"got float32 \[8, 8, 3\]"),
        (np.zeros((8, 8), np.uint8), r"got uint8 \[8, 8\]"),
        (np.zeros((8, 8, 4), np.uint8), r"got uint8 \[8, 8, 4\]"),
        (np.zeros((0, 8, 3), np.uint8), r"must not be empty, got shape \[0, 8, 3\]"),
        ("photo.png", "got str"),
    ],
)
def test_an_invalid_image_is_an_error_with_its_type_and_shape(image, message):
    with pytest.raises(ValueError, match=message):
        check_image(image)


def test_the_array_need_not_be_contiguous():
    image = make_image(224, 640)
    processor = PatchProcessor(CONFIG)
    every_other = image[:, ::2]
    expected = pixel_values(processor, np.ascontiguousarray(every_other))
    np.testing.assert_array_equal(pixel_values(processor, every_other), expected)
