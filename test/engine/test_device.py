# SPDX-License-Identifier: Apache-2.0
import errno
import mmap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from edgellm_ros.engine.device import ALIGNMENT, CpuDevice, open_device
from fixtures.on_device import error_without_gpu, put


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64, np.bool_])
def test_buffers_are_aligned_and_typed(device, dtype):
    tensor = device.zeros((3, 5), dtype)
    assert tensor.pointer % ALIGNMENT == 0
    assert tensor.dtype == dtype
    np.testing.assert_array_equal(device.download(tensor), np.zeros((3, 5), dtype))


def test_uploaded_data_is_downloaded_unchanged(device):
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = device.empty((2, 3), np.float32)
    device.upload(tensor, values)
    downloaded = device.download(tensor)
    np.testing.assert_array_equal(downloaded, values)
    downloaded[:] = 0  # a copy of its own
    np.testing.assert_array_equal(device.download(tensor), values)


def test_zeros_need_no_advice_about_their_pages(monkeypatch):
    """Kernels without large pages answer the advice with an error."""

    class Pages(mmap.mmap):
        def madvise(self, *_):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Pages)
    assert not CpuDevice().zeros((1 << 21,), np.uint8).array.any()


def test_an_adopted_array_is_a_tensor_with_its_contents(device):
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = device.adopt(values)
    np.testing.assert_array_equal(device.download(tensor), values)
    assert (tensor.array is values) == (device.name == "cpu")


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


def test_parts_of_a_tensor_are_filled_with_zeros(device):
    tensor = put(device, np.ones((3, 2), np.float16))
    device.fill_zero(tensor.rows(1, 2))
    np.testing.assert_array_equal(device.download(tensor), [[1, 1], [0, 0], [1, 1]])


@pytest.mark.only_on("cpu", reason="memory of the host")
def test_only_the_written_part_of_a_large_buffer_takes_memory(device):
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before, tensor = resident(), device.zeros((1 << 10, 1 << 16), np.uint8)  # 64 MiB
    for row in range(0, 1 << 10, 32):  # one page in each 2 MiB
        device.upload(tensor.rows(row, row + 1), np.ones((1, 1 << 16), np.uint8))
    assert resident() - before < 8 << 20
    assert device.download(tensor).sum() == 32 << 16


@pytest.mark.parametrize(("size", "count"), [(1, 300), (10_000, 100), (3_000_000, 3)])
def test_the_source_of_an_upload_may_change_at_once(device, size, count):
    tensors = [device.empty((size,), np.int64) for _ in range(count)]
    values = np.zeros(size, np.int64)
    for number, tensor in enumerate(tensors):
        values[:] = number
        device.upload(tensor, values)
    for number, tensor in enumerate(tensors):
        assert (device.download(tensor) == number).all()


def test_an_array_that_is_not_contiguous_is_uploaded_in_index_order(device):
    values = np.arange(12, dtype=np.int64).reshape(3, 4)[:, ::2]
    tensor = device.empty((3, 2), np.int64)
    device.upload(tensor, values)
    np.testing.assert_array_equal(device.download(tensor), values)


def test_a_tensor_without_elements_works_in_every_operation(device):
    empty, other = put(device, np.zeros((0, 4), np.float32)), device.zeros((0, 4), np.float32)
    device.copy(other, empty)
    device.fill_zero(other)
    assert device.download(other).shape == device.copy_to_host(empty).wait().shape == (0, 4)


def test_a_host_copy_has_the_contents_at_its_start(device):
    tensor = device.zeros((3,), np.int64)
    readings = []
    for number in range(50):
        device.upload(tensor, np.full(3, number))
        readings.append(device.copy_to_host(tensor))
    assert [reading.wait().tolist() for reading in readings] == [[number] * 3 for number in range(50)]


def test_a_host_copy_is_an_array_of_its_own(device):
    tensor = put(device, [1, 2])
    first = device.copy_to_host(tensor).wait()
    device.upload(tensor, np.array([3, 4]))
    second = device.copy_to_host(tensor).wait()
    assert (first.tolist(), second.tolist()) == ([1, 2], [3, 4])


def test_the_time_between_marks_is_that_of_the_work_between_them(device):
    began = time.perf_counter()
    marks = [device.mark()]
    for _ in range(2):
        time.sleep(0.01)
        device.zeros((100,), np.float32)
        marks.append(device.mark())
    whole, first = marks[2].seconds_since(marks[0]), marks[1].seconds_since(marks[0])
    assert whole == pytest.approx(first + marks[2].seconds_since(marks[1]), abs=1e-5)
    assert 0 < whole <= time.perf_counter() - began


def test_a_graph_runs_at_each_launch_and_not_during_recording(device):
    source, target = put(device, [1, 2]), put(device, [0, 0])
    graph = device.capture(lambda: device.copy(target, source))
    if graph is None:
        pytest.skip("this device has no graphs")
    assert device.download(target).tolist() == [0, 0]
    for values in ([3, 4], [5, 6]):
        device.upload(source, np.array(values))
        graph.launch(device.stream)
        assert device.download(target).tolist() == values


def test_a_device_works_after_a_failed_recording(device):
    tensor = put(device, [1, 2])

    def fail():
        device.fill_zero(tensor)
        raise RuntimeError("not this time")

    if device.capture(lambda: device.fill_zero(tensor)) is None:
        pytest.skip("this device has no graphs")
    with pytest.raises(RuntimeError, match="not this time"):
        device.capture(fail)
    assert device.download(tensor).tolist() == [1, 2]


def test_threads_may_share_a_device(device):
    def work(number: int) -> bool:
        tensor = device.empty((1000,), np.int64)
        for step in range(50):
            device.upload(tensor, np.full(1000, number + step))
            if not (device.copy_to_host(tensor).wait() == number + step).all():
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(0, 4000, 1000)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cuda", "tensorrt"])
def test_an_unavailable_device_is_an_error_that_says_so(name):
    program = f"from edgellm_ros.engine.device import open_device; open_device({name!r})"
    assert f"EngineError: device {name!r} is not available: " in error_without_gpu("-c", program)


def test_an_unknown_device_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ValueError, match="'tpu', expected 'cpu', 'cuda' or 'tensorrt'"):
        open_device("tpu")
