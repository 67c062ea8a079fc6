# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from on_device import error_without_gpu, put

from edgellm_ros.engine.device import ALIGNMENT, open_device


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64, np.bool_])
def test_buffers_are_aligned_and_typed(device, dtype):
    tensor = device.zeros((3, 5), dtype)
    assert tensor.pointer % ALIGNMENT == 0
    assert tensor.dtype == dtype
    np.testing.assert_array_equal(device.download(tensor), np.zeros((3, 5), dtype))


def test_what_was_uploaded_comes_back(device):
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = device.empty((2, 3), np.float32)
    device.upload(tensor, values)
    downloaded = device.download(tensor)
    np.testing.assert_array_equal(downloaded, values)
    downloaded[:] = 0  # a copy of its own
    np.testing.assert_array_equal(device.download(tensor), values)


def test_copying_between_shapes_or_types_is_an_error_that_names_both(device):
    tensor = device.empty((2, 3), np.float32)
    with pytest.raises(ValueError, match=r"float64 \[2, 3\] to float32 \[2, 3\]"):
        device.upload(tensor, np.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"float32 \[3, 2\] to float32 \[2, 3\]"):
        device.upload(tensor, np.zeros((3, 2), np.float32))


def test_a_tensor_is_copied_into_another(device):
    source, target = put(device, [[0, 1, 2], [3, 4, 5]]), put(device, np.zeros((4, 3), np.int64))
    device.copy(target.rows(1, 3), source)
    np.testing.assert_array_equal(device.download(target), [[0, 0, 0], [0, 1, 2], [3, 4, 5], [0, 0, 0]])


@pytest.mark.parametrize("name", ["cuda", "tensorrt"])
def test_a_device_that_is_not_here_says_so(name):
    program = f"from edgellm_ros.engine.device import open_device; open_device({name!r})"
    assert f"EngineError: device {name!r} is not available: " in error_without_gpu("-c", program)


def test_an_unknown_device_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ValueError, match="'tpu', expected 'cpu', 'cuda' or 'tensorrt'"):
        open_device("tpu")
