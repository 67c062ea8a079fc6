# SPDX-License-Identifier: Apache-2.0
"""Arrays of one upload: their contents, their places, and what may change when."""

from __future__ import annotations

import numpy as np
import pytest

from doubles.deferred_runtime import WatchedDevice
from edgellm_ros.engine.packed_arrays import KEPT_LAYOUTS, PackedBuffer

FIELDS = {
    "ids": ((2, 3), np.int64),
    "none": ((0, 4), np.float32),
    "odd": ((5,), np.uint8),
    "positions": ((2, 3, 7), np.float32),
}


def written(packed, seed: int) -> dict[str, np.ndarray]:
    """Write random values to all arrays; return copies."""
    rng = np.random.default_rng(seed)
    for array in packed.arrays.values():
        array[...] = rng.integers(0, 99, array.shape)
    return {name: array.copy() for name, array in packed.arrays.items()}


def test_one_upload_takes_all_arrays_to_the_device(device):
    packed = PackedBuffer(device, FIELDS).layout(FIELDS)
    expected = written(packed, 0)
    packed.upload()
    for name, (shape, dtype) in FIELDS.items():
        found = device.download(packed.tensors[name])
        assert (found.shape, found.dtype) == (shape, dtype)
        np.testing.assert_array_equal(found, expected[name])


def test_arrays_are_aligned_and_apart(device):
    packed = PackedBuffer(device, FIELDS).layout(FIELDS)
    ends = 0
    for tensor in packed.tensors.values():
        assert tensor.pointer % 64 == 0
        assert tensor.pointer >= ends
        ends = tensor.pointer + tensor.size * tensor.dtype.itemsize


@pytest.mark.only_on("cpu", reason="this test brings its own device")
def test_a_layout_is_one_upload_and_may_be_written_again_before_the_copy_is_made():
    device = WatchedDevice()
    packed = PackedBuffer(device, FIELDS).layout(FIELDS)
    device.calls.clear()
    kept = [device.empty(shape, dtype) for shape, dtype in FIELDS.values()]
    expected = []
    for seed in range(2):
        expected.append(written(packed, seed))
        packed.upload()
        if not seed:
            for target, source in zip(kept, packed.tensors.values(), strict=True):
                device.copy(target, source)
    assert device.calls["upload"] == 2
    for target, name in zip(kept, FIELDS, strict=True):
        np.testing.assert_array_equal(device.download(target), expected[0][name])
        np.testing.assert_array_equal(device.download(packed.tensors[name]), expected[1][name])


def test_equal_layouts_have_the_same_places_for_ever(device):
    buffer = PackedBuffer(device, {**FIELDS, "ids": ((KEPT_LAYOUTS + 1,), np.int64)})
    first = {name: tensor.pointer for name, tensor in buffer.layout(FIELDS).tensors.items()}
    for size in range(KEPT_LAYOUTS + 1):
        buffer.layout({"ids": ((size,), np.int64)})
    assert {name: tensor.pointer for name, tensor in buffer.layout(FIELDS).tensors.items()} == first


def test_a_layout_that_is_too_large_is_an_error(device):
    buffer = PackedBuffer(device, FIELDS)
    with pytest.raises(ValueError, match="outside a tensor"):
        buffer.layout({**FIELDS, "more": ((1,), np.int64)})
