# SPDX-License-Identifier: Apache-2.0
"""Tensors on a GPU for other libraries, their arrays for us, and streams."""

import numpy as np
import pytest

from edgellm_ros.engine.borrowing import borrow
from edgellm_ros.engine.device import open_device
from edgellm_ros.engine.tensor import bfloat16, float8
from fixtures.on_device import put

pytestmark = pytest.mark.only_on("cuda", reason="these tests share memory of a GPU")


@pytest.fixture(scope="module")
def stream():
    core = pytest.importorskip("cuda.core")
    gpu = core.Device(0)
    gpu.set_current()
    return gpu.create_stream()


@pytest.fixture(scope="module")
def on_stream(stream):
    """A device that works on a stream of the test."""
    return open_device("cuda", stream=stream)


def copied_by_a_graph(device) -> list[int]:
    source, target = put(device, [1, 2]), put(device, [0, 0])
    device.capture(lambda: device.copy(target, source)).launch(device.stream)
    return device.download(target).tolist()


@pytest.mark.parametrize("by_handle", [False, True])
def test_a_device_works_on_the_caller_s_stream_and_does_not_destroy_it(stream, by_handle):
    given = int(stream.handle) if by_handle else stream
    device = open_device("cuda", stream=given)
    assert int(device.stream.handle) == int(stream.handle)
    assert copied_by_a_graph(device) == [1, 2]
    del device
    stream.record().sync()


def test_a_runtime_answers_and_records_on_the_caller_s_stream(stream, tiny_engine, runtime_device):
    from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
    from fixtures.requests_for_tests import request

    one = request("what do you see?", max_tokens=8)
    with LLMInferenceRuntime(tiny_engine, runtime_device) as runtime:
        expected = runtime.handle_request(one).token_ids
    with LLMInferenceRuntime(tiny_engine, runtime_device, stream=stream) as runtime:
        assert runtime.handle_request(one).token_ids == expected
        assert runtime.capture_decoding_cuda_graph() is True
        assert runtime.handle_request(one).token_ids == expected
    stream.record().sync()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64, np.uint8, np.bool_, "bf16"])
def test_dlpack_gives_address_shape_and_type(device, on_stream, dtype):
    utils = pytest.importorskip("cuda.core.utils")
    values = np.arange(6).reshape(2, 3).astype(bfloat16() if dtype == "bf16" else dtype)
    tensor = put(device, values)
    assert tensor.__dlpack_device__() == (2, 0)
    view = utils.StridedMemoryView.from_dlpack(tensor, stream_ptr=int(on_stream.stream.handle))
    assert (view.ptr, tuple(view.shape), view.dtype) == (tensor.pointer, (2, 3), tensor.dtype)


def test_a_consumer_waits_for_what_was_queued(device, on_stream):
    """The second device copies what the first one still computes."""
    size = 1 << 24
    source, target = device.zeros((size,), np.int32), on_stream.zeros((size,), np.int32)
    on_stream.synchronize()
    for number in range(1, 20):
        device.upload(source, np.full(size, number, np.int32))
        on_stream.copy(target, borrow(on_stream, source))
        assert (on_stream.download(target) == number).all()


def test_the_cuda_array_interface_has_our_stream_and_no_bf16(device):
    tensor = put(device, np.ones((2, 3), np.float16))
    described = tensor.__cuda_array_interface__
    assert described["data"] == (tensor.pointer, False)
    assert (described["shape"], described["typestr"], described["version"]) == ((2, 3), "<f2", 3)
    assert described["stream"] == int(device.stream.handle)
    assert not hasattr(put(device, np.ones(2), bfloat16()), "__cuda_array_interface__")
    assert not hasattr(tensor, "__array_interface__")


def test_memory_of_a_borrowed_array_lives_as_long_as_the_tensor(device, on_stream):
    tensor = borrow(on_stream, put(device, np.arange(1000)))
    put(device, np.zeros(1000, np.int64))  # would get the memory, if it were free
    assert (on_stream.download(tensor) == np.arange(1000)).all()


def test_stream_0_is_refused_as_ambiguous(device):
    with pytest.raises(BufferError, match="stream 0 is ambiguous"):
        put(device, [1]).__dlpack__(stream=0)


def test_an_array_on_the_host_is_refused(device):
    with pytest.raises(ValueError, match="the array is in host memory, and the device is"):
        borrow(device, np.ones(3))


class TestTorch:
    """Both directions, with PyTorch if it is installed for this GPU."""

    @pytest.fixture(scope="class")
    def torch(self):
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("this PyTorch has no CUDA")
        return torch

    def test_pytorch_reads_a_tensor(self, torch, device):
        values = np.arange(12, dtype=np.float32).reshape(3, 4)
        tensor = put(device, values)
        found = torch.from_dlpack(tensor)
        assert found.data_ptr() == tensor.pointer
        np.testing.assert_array_equal(found.cpu().numpy(), values)
        np.testing.assert_array_equal(torch.as_tensor(tensor, device="cuda").cpu().numpy(), values)

    def test_pytorch_reads_bf16_and_fp8(self, torch, device):
        for dtype, expected in ((bfloat16(), torch.bfloat16), (float8(), torch.float8_e4m3fn)):
            found = torch.from_dlpack(put(device, np.array([1.5, -2.0]).astype(dtype)))
            assert found.dtype == expected
            assert found.float().cpu().tolist() == [1.5, -2.0]

    def test_a_tensor_of_pytorch_is_borrowed_with_its_dtype(self, torch, device):
        for kind in (torch.float32, torch.bfloat16, torch.uint8):
            given = torch.arange(12, device="cuda").reshape(3, 4).to(kind)
            tensor = borrow(device, given)
            assert tensor.pointer == given.data_ptr()
            assert device.download(tensor).astype(np.float32).tolist() == given.float().cpu().tolist()

    def test_a_transposed_tensor_is_refused(self, torch, device):
        with pytest.raises(ValueError, match=r"of shape \[4, 3\] must be contiguous, got strides \[1, 4\]"):
            borrow(device, torch.zeros((3, 4), device="cuda").T)

    def test_a_stream_of_pytorch_is_used(self, torch):
        stream = torch.cuda.Stream()
        device = open_device("cuda", stream=stream.cuda_stream)
        assert device.download(put(device, [1, 2, 3])).tolist() == [1, 2, 3]
