# SPDX-License-Identifier: Apache-2.0
"""Tensors for other libraries, on the host: DLPack and NumPy's array interface."""

import gc
import weakref

import numpy as np
import pytest

from edgellm_ros.engine import dlpack
from edgellm_ros.engine.borrowing import borrow, is_array, is_contiguous, is_on_gpu, on_host
from edgellm_ros.engine.device import CpuDevice
from edgellm_ros.engine.tensor import Tensor, bfloat16, float8

pytestmark = pytest.mark.only_on("cpu", reason="test_cuda_exchange.py is for GPUs")


class Watched(np.ndarray):
    """An array that weak references may watch."""


class Producer:
    """An object that gives a capsule, once."""

    def __init__(self, capsule):
        self._capsules = [capsule]

    def __dlpack__(self, **options):
        return self._capsules.pop()

    def __dlpack_device__(self):
        return dlpack.CPU, 0


def tensor_of(values, dtype) -> Tensor:
    return Tensor.from_array(np.ascontiguousarray(values).astype(dtype))


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, np.float64, np.int64, np.int32, np.uint8, np.uint64, np.bool_]
)
def test_numpy_reads_a_tensor_s_memory(dtype):
    tensor = tensor_of(np.arange(24).reshape(2, 3, 4) % 2, dtype)
    found = np.from_dlpack(tensor)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, tensor.array)
    tensor.array[1, 2, 3] = 7
    assert found[1, 2, 3] == tensor.array[1, 2, 3]


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (5, 1, 2)])
def test_all_shapes_are_exported(shape):
    found = np.from_dlpack(Tensor.from_array(np.ones(shape, np.float32)))
    np.testing.assert_array_equal(found, np.ones(shape))


def test_a_view_is_exported_from_its_first_element():
    tensor = tensor_of(np.arange(24).reshape(4, 6), np.float32)
    np.testing.assert_array_equal(np.from_dlpack(tensor.rows(1, 3)), tensor.array[1:3])


@pytest.mark.parametrize("version", [None, (0, 8), (1, 0), (2, 0)])
def test_an_exported_tensor_lives_as_long_as_its_consumer(version):
    array = np.arange(6, dtype=np.float32).view(Watched)
    owner = weakref.ref(array)
    capsule = Tensor.from_array(array).__dlpack__(max_version=version)
    del array
    gc.collect()
    assert owner() is not None

    found = np.from_dlpack(Producer(capsule))
    del capsule
    gc.collect()
    assert found.tolist() == [0, 1, 2, 3, 4, 5]
    del found
    gc.collect()
    assert owner() is None


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_a_capsule_without_a_consumer_frees_its_tensor(version):
    array = np.arange(6, dtype=np.float32).view(Watched)
    owner, exported = weakref.ref(array), len(dlpack._exported)
    capsule = Tensor.from_array(array).__dlpack__(max_version=version)
    assert len(dlpack._exported) == exported + 1
    del array, capsule
    gc.collect()
    assert owner() is None
    assert len(dlpack._exported) == exported


@pytest.mark.parametrize(("dtype", "code"), [(bfloat16(), 4), (float8(), 10)])
def test_types_that_numpy_lacks_have_dlpack_s_codes(dtype, code):
    tensor = tensor_of([1.5, -2.0], dtype)
    capsule = tensor.__dlpack__()
    ((managed, _, kept),) = [entry for entry in dlpack._exported.values() if entry[2] is tensor]
    described = managed.tensor.dtype
    assert (described.code, described.bits, described.lanes) == (code, dtype.itemsize * 8, 1)
    assert kept is tensor
    del capsule


def test_a_request_that_a_tensor_cannot_serve_is_a_buffer_error():
    tensor = tensor_of([1, 2], np.float32)
    with pytest.raises(BufferError, match="makes no copy"):
        tensor.__dlpack__(copy=True)
    with pytest.raises(BufferError, match=r"is on the device \(1, 0\), not on \(2, 0\)"):
        tensor.__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError, match="has no stream, got 5"):
        tensor.__dlpack__(stream=5)


def test_numpy_takes_a_tensor_by_its_array_interface_without_a_copy():
    tensor = tensor_of([1, 2], np.float32)
    assert np.shares_memory(np.asarray(tensor), tensor.array)
    assert not hasattr(tensor, "__cuda_array_interface__")
    assert not hasattr(tensor_of([1, 2], bfloat16()), "__array_interface__")


def test_an_array_of_another_library_on_the_host_becomes_a_tensor_without_a_copy():
    class Foreign:
        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = borrow(CpuDevice(), Foreign(array))
    assert tensor.pointer == array.__array_interface__["data"][0]
    assert tensor.shape == (2, 3)
    with pytest.raises(ValueError, match="not contiguous"):
        borrow(CpuDevice(), Foreign(array.T))


class OnGpu:
    """What a library's array on a GPU looks like to a machine without one."""

    @property
    def __cuda_array_interface__(self):
        return {"shape": (2,), "typestr": "<f4", "data": (64, False), "version": 3}


def test_an_array_on_a_gpu_is_refused_on_a_cpu():
    assert is_array(OnGpu())
    assert is_on_gpu(OnGpu())
    with pytest.raises(ValueError, match="the array is on a GPU, and the device is CPU"):
        borrow(CpuDevice(), OnGpu())
    with pytest.raises(ValueError, match="expected an array in host memory, got OnGpu"):
        on_host(OnGpu())


def test_what_is_no_array_is_refused():
    assert not is_array([1, 2])
    with pytest.raises(ValueError, match="expected an array in host memory, got list"):
        borrow(CpuDevice(), [1, 2])


@pytest.mark.parametrize(
    ("shape", "strides", "contiguous"),
    [
        ((2, 3), None, True),
        ((2, 3), (3, 1), True),
        ((2, 3), (4, 1), False),
        ((2, 3), (1, 2), False),
        ((1, 3), (99, 1), True),
        ((2, 0), (7, 7), True),
    ],
)
def test_strides_say_whether_an_array_is_row_major(shape, strides, contiguous):
    assert is_contiguous(shape, strides) is contiguous
