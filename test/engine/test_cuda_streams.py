# SPDX-License-Identifier: Apache-2.0
"""Streams of callers and consumers, with a driver that notes its calls."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="needs requirements-cuda.txt")

from edgellm_ros.engine.borrowing import borrow
from edgellm_ros.engine.cuda import device as cuda_device
from edgellm_ros.engine.cuda.device import CudaDevice
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.tensor import Tensor, bfloat16

pytestmark = pytest.mark.only_on("cpu", reason="these tests bring their own driver")
OURS, CONTEXT, EVENT = 0x7F10, 0xC0, 0xE0
SUCCESS = cuda_device.driver.CUresult.CUDA_SUCCESS


@pytest.fixture
def calls(monkeypatch):
    """The calls of the driver: names and numbers."""
    noted = []

    def call(name, *results):
        def run(*arguments):
            noted.append((name, *map(int, arguments)))
            return SUCCESS, *results

        return run

    driver = SimpleNamespace(
        CUstream=int,
        CUevent_flags=SimpleNamespace(CU_EVENT_DEFAULT=0),
        cuCtxSetCurrent=call("current"),
        cuEventCreate=call("event", EVENT),
        cuEventDestroy=call("destroy"),
        cuEventRecord=call("record"),
        cuStreamWaitEvent=call("wait"),
        cuStreamGetCtx=lambda stream: (SUCCESS, CONTEXT if stream == OURS else 0xC1),
    )
    monkeypatch.setattr(cuda_device, "driver", driver)
    monkeypatch.setattr(cuda_device, "release_with", lambda *arguments: None)
    return noted


@pytest.fixture
def gpu(calls) -> CudaDevice:
    device = CudaDevice.__new__(CudaDevice)
    device._stream, device._context, device.description = OURS, CONTEXT, "a GPU"
    device.stream = SimpleNamespace(handle=OURS)
    device._marks = []
    device._lock, device._current = threading.RLock(), SimpleNamespace(ready=True)
    return device


@pytest.fixture
def tensor(gpu) -> Tensor:
    return Tensor(0x1000, (2, 3), np.dtype(np.float16), SimpleNamespace(device=gpu))


@pytest.mark.parametrize(("stream", "waits"), [(None, 1), (1, 1), (2, 2), (0x55, 0x55)])
def test_the_consumer_s_stream_waits_for_ours(tensor, calls, stream, waits):
    tensor.__dlpack__(stream=stream)
    assert calls[-2:] == [("record", EVENT, OURS), ("wait", waits, EVENT, 0)]


@pytest.mark.parametrize("stream", [-1, OURS])
def test_nothing_waits_without_a_consumer_s_own_stream(tensor, calls, stream):
    tensor.__dlpack__(stream=stream)
    assert calls == []


class TestMarks:
    """Marks take their events from those that are gone."""

    READY, LATE = (SUCCESS, 2.5), (cuda_device.driver.CUresult.CUDA_ERROR_NOT_READY, 0.0)

    @pytest.fixture
    def elapsed(self, calls, monkeypatch):
        """What the driver answers when it is asked for times, in order."""
        answers = []
        driver = cuda_device.driver
        driver.CUresult = SimpleNamespace(CUDA_ERROR_NOT_READY=self.LATE[0], CUDA_SUCCESS=SUCCESS)
        driver.cuEventElapsedTime = lambda *events: calls.append(("elapsed", *events)) or answers.pop(0)
        driver.cuEventSynchronize = lambda event: calls.append(("synchronize", event)) or (SUCCESS,)
        return answers

    def test_an_event_is_used_again_when_its_mark_is_gone(self, gpu, calls):
        first, second = gpu.mark(), gpu.mark()
        assert [name for name, *_ in calls] == ["event", "record"] * 2
        del first
        third = gpu.mark()
        fourth = gpu.mark()
        assert [name for name, *_ in calls[4:]] == ["record", "event", "record"]
        assert len({id(mark) for mark in (second, third, fourth)}) == 3
        assert ("destroy", EVENT) not in calls

    def test_a_reached_mark_is_not_waited_for(self, gpu, calls, elapsed):
        start, end = gpu.mark(), gpu.mark()
        elapsed += [self.READY]
        assert end.seconds_since(start) == 2.5e-3
        assert calls[4:] == [("elapsed", EVENT, EVENT)]

    def test_another_mark_is(self, gpu, calls, elapsed):
        start, end = gpu.mark(), gpu.mark()
        elapsed += [self.LATE, self.READY]
        assert end.seconds_since(start) == 2.5e-3
        assert [name for name, *_ in calls[4:]] == ["elapsed", "synchronize", "elapsed"]


def test_stream_0_is_ambiguous(tensor):
    with pytest.raises(BufferError, match="stream 0 is ambiguous"):
        tensor.__dlpack__(stream=0)


def test_a_tensor_on_a_gpu_describes_itself(tensor):
    assert tensor.__dlpack_device__() == (2, 0)
    assert tensor.__cuda_array_interface__ == {
        "shape": (2, 3),
        "typestr": "<f2",
        "data": (0x1000, False),
        "version": 3,
        "strides": None,
        "stream": OURS,
    }
    assert not hasattr(tensor, "__array_interface__")


def test_the_cuda_array_interface_has_no_bf16(gpu):
    tensor = Tensor(0x1000, (2,), bfloat16(), SimpleNamespace(device=gpu))
    with pytest.raises(AttributeError, match="has no type bfloat16: use DLPack"):
        _ = tensor.__cuda_array_interface__


def test_a_stream_of_another_context_is_refused(gpu):
    with pytest.raises(EngineError, match="stream 0x99 is not of the primary CUDA context of a GPU"):
        gpu._stream_of_caller(0x99)


class Array:
    """An array of another library on a GPU."""

    def __init__(self, strides=None, ordinal=0):
        self.view = SimpleNamespace(
            ptr=0x2000, shape=(4, 2), dtype=np.dtype(np.uint8), strides=strides, device_id=ordinal
        )

    def __dlpack_device__(self):
        return 2, self.view.device_id


@pytest.fixture
def asked(monkeypatch):
    """The streams for which views were made."""
    streams = []

    class Views:
        @staticmethod
        def from_any_interface(value, stream_ptr):
            streams.append(stream_ptr)
            return value.view

    monkeypatch.setattr(cuda_device, "StridedMemoryView", Views)
    return streams


def test_an_array_is_borrowed_for_our_stream_and_kept(gpu, asked):
    array = Array(strides=(2, 1))
    tensor = borrow(gpu, array)
    assert (tensor.pointer, tensor.shape, tensor.dtype) == (0x2000, (4, 2), np.uint8)
    assert tensor.owner.view is array.view
    assert asked == [OURS]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (Array(strides=(1, 4)), r"of shape \[4, 2\] must be contiguous, got strides \[1, 4\]"),
        (Array(ordinal=1), "is on GPU 1, and the device is GPU 0"),
    ],
)
def test_an_array_that_does_not_fit_is_refused(gpu, asked, array, message):
    with pytest.raises(ValueError, match=message):
        borrow(gpu, array)
