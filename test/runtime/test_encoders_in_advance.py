# SPDX-License-Identifier: Apache-2.0
"""Images and sounds that run when the runtime is made: the first finds a graph."""

import logging

import numpy as np
import pytest

from doubles.deferred_runtime import WatchedDevice, queueing, used
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.multimodal.audio.runner import AudioRunner
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures.reference_inputs import make_image
from fixtures.requests_for_tests import SOUND, assert_same_answer, request

pytestmark = pytest.mark.only_on("cpu", reason="these tests bring their own device")
LOOKING, HEARING = (
    request(images=(make_image(480, 640),), max_tokens=1),
    request(audio=(SOUND,), max_tokens=1),
)


@pytest.fixture(scope="module", autouse=True)
def _queueing():
    with queueing():
        yield


@pytest.fixture
def deferred(acting_engine):
    with LLMInferenceRuntime(acting_engine, WatchedDevice(), prefix_cache_bytes=0) as runtime:
        yield runtime


@pytest.mark.parametrize("first", [LOOKING, HEARING], ids=["image", "sound"])
def test_the_first_of_a_usual_size_is_replayed(deferred, acting_runtime, first):
    launches, captures = used(deferred, first)
    assert launches > used(deferred, request(max_tokens=1))[0]
    assert captures == 0
    assert_same_answer(deferred.handle_request(first), acting_runtime.handle_request(first))


def test_what_cannot_run_in_advance_does_not_keep_the_runtime_from_answering(
    acting_engine, acting_runtime, monkeypatch, caplog
):
    def fail(runner):
        raise EngineError("no memory for a sound")

    monkeypatch.setattr(AudioRunner, "warm_up", fail)
    with LLMInferenceRuntime(acting_engine, WatchedDevice(), prefix_cache_bytes=0) as runtime:
        assert_same_answer(runtime.handle_request(HEARING), acting_runtime.handle_request(HEARING))
    assert "images and sounds are not run in advance: no memory for a sound" in caplog.messages


def test_a_second_capture_runs_nothing_again(deferred, caplog):
    caplog.set_level(logging.INFO)
    deferred.capture_decoding_cuda_graph()
    assert not [line for line in caplog.messages if "in advance" in line]


def test_without_graphs_nothing_runs_in_advance(acting_engine, monkeypatch):
    monkeypatch.setattr(AudioRunner, "warm_up", lambda runner: pytest.fail("ran"))
    with LLMInferenceRuntime(acting_engine, "cpu", prefix_cache_bytes=0) as runtime:
        assert not runtime.capture_decoding_cuda_graph()
    with LLMInferenceRuntime(acting_engine, WatchedDevice(), cuda_graphs=False) as runtime:
        assert np.isfinite(runtime.handle_request(HEARING).metrics["total_s"])
