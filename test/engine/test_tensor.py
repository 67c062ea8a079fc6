# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from edgellm_ros.engine.tensor import Tensor


@pytest.fixture
def tensor() -> Tensor:
    return Tensor.from_array(np.arange(24, dtype=np.float32).reshape(4, 2, 3))


def test_a_view_shows_the_first_elements_in_another_shape_without_copying(tensor):
    view = tensor.view(2, 5)
    assert view.pointer == tensor.pointer
    np.testing.assert_array_equal(view.array, np.arange(10).reshape(2, 5))
    view.array[0, 0] = -1
    assert tensor.array[0, 0, 0] == -1


def test_a_view_larger_than_its_tensor_is_an_error(tensor):
    with pytest.raises(ValueError, match=r"\(5, 5\) has 25 elements"):
        tensor.view(5, 5)


def test_rows_are_a_window_along_the_first_axis(tensor):
    rows = tensor.rows(1, 3)
    assert rows.pointer == tensor.pointer + 1 * 6 * 4
    assert rows.shape == (2, 2, 3)
    np.testing.assert_array_equal(rows.array, tensor.array[1:3])


def test_equal_views_are_one_object(tensor):
    assert tensor.view(2, 5) is tensor.view(2, 5)
    assert tensor.rows(1, 3) is tensor.rows(1, 3)
    assert tensor.rows(0, 2).shape != tensor.view(0, 2).shape


def test_a_tensor_keeps_a_bounded_number_of_views(tensor):
    first = tensor.view(1)
    for more in range(240):
        tensor.view(more % 24, *[1] * (1 + more // 24))
    assert tensor.view(1) is not first


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 5), (3, 2)])
def test_rows_outside_of_the_tensor_are_an_error(tensor, start, stop):
    with pytest.raises(ValueError, match="outside"):
        tensor.rows(start, stop)


def test_size_counts_elements(tensor):
    assert tensor.size == tensor.view(6, 4).size == 24


def test_only_contiguous_arrays_become_tensors():
    with pytest.raises(ValueError, match="not contiguous"):
        Tensor.from_array(np.zeros((4, 4))[:, ::2])
