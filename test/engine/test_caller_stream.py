# SPDX-License-Identifier: Apache-2.0
"""The stream that a caller gives to a device or a runtime."""

import pytest

from edgellm_ros.engine.caller_stream import stream_handle
from edgellm_ros.engine.device import CpuDevice, open_device
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime


class Stream:
    def __init__(self, handle, version=0):
        self._handle, self._version = handle, version

    def __cuda_stream__(self):
        return self._version, self._handle


@pytest.mark.parametrize("stream", [0x7F00, Stream(0x7F00)])
def test_a_stream_is_a_handle_or_an_object_with_the_protocol(stream):
    assert stream_handle(stream) == 0x7F00


@pytest.mark.parametrize("stream", ["5", True, 1.5, object(), Stream(None), -4])
def test_what_is_no_stream_is_refused(stream):
    with pytest.raises(ValueError, match="stream must be a handle"):
        stream_handle(stream)


@pytest.mark.parametrize(
    ("handle", "name"), [(0, "legacy default"), (1, "legacy default"), (2, "per-thread default")]
)
def test_default_streams_are_refused_as_graphs_cannot_use_them(handle, name):
    with pytest.raises(ValueError, match=rf"got the {name} stream \({handle}\)"):
        open_device("cuda", stream=Stream(handle))


def test_an_unknown_version_of_the_protocol_is_refused():
    with pytest.raises(ValueError, match="version 1 of the protocol is not known"):
        stream_handle(Stream(0x7F00, version=1))


def test_a_cpu_has_no_streams(tiny_engine):
    with pytest.raises(ValueError, match="device 'cpu' has no streams"):
        LLMInferenceRuntime(tiny_engine, "cpu", stream=0x7F00)


def test_a_device_brings_its_own_stream(tiny_engine):
    with pytest.raises(ValueError, match="a Device has its own stream"):
        LLMInferenceRuntime(tiny_engine, CpuDevice(), stream=0x7F00)
