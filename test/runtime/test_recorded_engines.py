# SPDX-License-Identifier: Apache-2.0
"""Graphs of the encoders and of all Euler steps; Euler steps upload nothing."""

import dataclasses

import numpy as np
import pytest

from doubles.deferred_runtime import WatchedDevice, queueing, used
from edgellm_ros.diffusion.action_runner import KEPT_GRAPHS, STEPS_PER_GRAPH
from edgellm_ros.diffusion.chunking import ChunkCondition
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures.requests_for_tests import IMAGE, OTHER_IMAGE, OTHER_SOUND, SOUND, assert_same_answer, request

pytestmark = pytest.mark.only_on("cpu", reason="these tests bring their own device")
CHUNK = np.linspace(-1, 1, 12, dtype=np.float32).reshape(6, 2)
ACTING = request(images=(IMAGE,), max_tokens=30, action_samples=2, denoise_steps=4)


def continuing(**condition):
    """Return ACTING as the continuation of CHUNK."""
    return dataclasses.replace(ACTING, previous_chunk=ChunkCondition(actions=CHUNK, executed=1, **condition))


@pytest.fixture(scope="module", autouse=True)
def _queueing():
    with queueing():
        yield


@pytest.fixture(autouse=True)
def _only_engines(monkeypatch):
    """Leave decode steps and prefills unrecorded, to count graphs of engines only."""
    monkeypatch.setattr(LLMInferenceRuntime, "capture_decoding_cuda_graph", lambda runtime: False)


@pytest.fixture
def deferred(acting_engine):
    with LLMInferenceRuntime(acting_engine, WatchedDevice(), prefix_cache_bytes=0) as runtime:
        yield runtime


def test_all_euler_steps_are_one_graph_after_the_first_run_of_a_binding(deferred):
    assert used(deferred, ACTING) == (0, 1)
    assert used(deferred, ACTING) == (1, 1)  # the same frame again: the vision tower
    assert used(deferred, ACTING) == (1 + 1, 0)
    assert used(deferred, dataclasses.replace(ACTING, action_samples=5)) == (1, 1)
    assert used(deferred, dataclasses.replace(ACTING, denoise_steps=3)) == (1, 1)
    assert used(deferred, ACTING, ACTING) == (1 + 1, 1)  # another row of the cache
    assert used(deferred, ACTING) == (1 + 1, 0)


def test_many_euler_steps_are_several_graphs(acting_runtime, deferred):
    many = dataclasses.replace(ACTING, denoise_steps=STEPS_PER_GRAPH + 3)
    deferred.handle_request(many)
    deferred.handle_request(many)
    assert used(deferred, many) == (1 + 2, 0)
    assert_same_answer(deferred.handle_request(many), acting_runtime.handle_request(many))


def test_the_oldest_graphs_of_euler_steps_are_dropped(deferred):
    for steps in range(1, KEPT_GRAPHS + 2):
        deferred.handle_request(dataclasses.replace(ACTING, denoise_steps=steps))
    assert used(deferred, dataclasses.replace(ACTING, denoise_steps=2)) == (1 + 1, 0)
    assert used(deferred, dataclasses.replace(ACTING, denoise_steps=1)) == (1, 1)


def test_recorded_engines_answer_as_on_the_cpu(acting_runtime, deferred):
    expected = acting_runtime.handle_request(ACTING)
    assert expected.actions is not None
    for _ in range(4):
        assert_same_answer(deferred.handle_request(ACTING), expected)
        for answer in deferred.handle_request([ACTING, ACTING]):
            assert_same_answer(answer, expected)


def test_euler_steps_upload_nothing(acting_runtime, deferred):
    sent = []
    deferred.handle_request(ACTING)
    for steps in (1, 4, 40):
        one = dataclasses.replace(ACTING, denoise_steps=steps)
        deferred.pipeline.device.calls.clear()
        assert_same_answer(deferred.handle_request(one), acting_runtime.handle_request(one))
        sent.append(deferred.pipeline.device.calls["upload"])
    assert sent == sent[:1] * 3


class TestChunks:
    """Runs that continue a chunk have graphs of their own, which serve every such run."""

    GUIDED = continuing(form="guided", delay=2)
    FROZEN = continuing(form="frozen", delay=1)

    def test_a_graph_serves_all_conditions(self, deferred):
        assert used(deferred, ACTING) == (0, 1)
        assert used(deferred, ACTING) == (1, 1)  # the same frame again: the vision tower
        assert used(deferred, self.GUIDED) == (1, 1)
        assert used(deferred, self.FROZEN) == (1 + 1, 0)
        assert used(deferred, ACTING) == (1 + 1, 0)

    def test_recorded_conditions_answer_as_on_the_cpu(self, acting_runtime, deferred):
        expected = [acting_runtime.handle_request(one) for one in (ACTING, self.GUIDED, self.FROZEN)]
        for _ in range(3):
            for one, answer in zip((ACTING, self.GUIDED, self.FROZEN), expected, strict=True):
                assert_same_answer(deferred.handle_request(one), answer)

    def test_more_steps_than_a_graph_has_answer_as_on_the_cpu(self, acting_runtime, deferred):
        many = dataclasses.replace(self.GUIDED, denoise_steps=STEPS_PER_GRAPH + 3)
        for _ in range(3):
            assert_same_answer(deferred.handle_request(many), acting_runtime.handle_request(many))


def test_a_frame_size_is_recorded_when_it_is_encoded_again(deferred):
    looking = [request(images=(image,), max_tokens=1) for image in (IMAGE, OTHER_IMAGE)]
    assert [used(deferred, looking[i]) for i in (0, 1, 0, 1, 0, 1)] == [
        *[(0, 0), (0, 0), (0, 1), (0, 1), (1, 0), (1, 0)]
    ]


def test_a_length_of_sounds_is_recorded_when_it_is_encoded_again(acting_runtime, deferred):
    def hearing(sound, volume):  # a new sound: the rows of one that was heard before are copied
        quieter = Sound((volume * sound.samples).astype(np.float32), sound.sample_rate)
        return request(audio=(quieter,), max_tokens=4)

    new = [
        hearing(*each)
        for each in ((SOUND, 0.9), (OTHER_SOUND, 0.9), (SOUND, 0.8), (SOUND, 0.7), (OTHER_SOUND, 0.8))
    ]
    assert [used(deferred, one) for one in new] == [(0, 0), (0, 0), (0, 1), (1, 0), (0, 1)]
    assert used(deferred, new[-1]) == (0, 0)
    for one in new:
        assert_same_answer(deferred.handle_request(one), acting_runtime.handle_request(one))


def test_an_engine_that_cannot_be_recorded_runs_without_a_graph_and_logs_why_once(
    acting_engine, acting_runtime, caplog
):
    class Refusing(WatchedDevice):
        def capture(self, record):
            raise EngineError("it copies")

    with LLMInferenceRuntime(acting_engine, Refusing(), prefix_cache_bytes=0) as runtime:
        for _ in range(3):
            assert_same_answer(runtime.handle_request(ACTING), acting_runtime.handle_request(ACTING))
    assert sorted(record.getMessage() for record in caplog.records) == [
        "action/model.onnx runs without graphs: it copies",
        "visual/model.onnx runs without graphs: it copies",
    ]
