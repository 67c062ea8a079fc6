# SPDX-License-Identifier: Apache-2.0
"""`decode_backend`: decoding on another backend than prefills, on one KV cache."""

import shutil
import sys

import pytest

from doubles import tensorrt_double
from doubles.deferred_runtime import WatchedDevice, queueing
from edgellm_ros.builder.tensorrt.plan import PlanOptions, build_plan
from edgellm_ros.builder.tensorrt.profiles import make_profiles
from edgellm_ros.engine.executor import BACKENDS
from edgellm_ros.engine.tensorrt.backend import TensorRTBackend
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures.requests_for_tests import IMAGE, SOUND, assert_same_answer, assert_same_bits, request

pytestmark = pytest.mark.only_on("cpu", reason="these tests bring their own device")
BATCH = [
    request(images=(IMAGE,), max_tokens=30, action_samples=2, noise_seed=5),
    request("what do you see?", audio=(SOUND,), max_tokens=20, repetition_penalty=1.3, logprobs=2),
    request("stop", max_tokens=12, temperature=1.2, seed=3),
]


@pytest.fixture
def tensorrt_engine(acting_engine, tmp_path, monkeypatch):
    """An engine directory whose language model has a plan made by TensorRT's double."""
    monkeypatch.setitem(sys.modules, "tensorrt", tensorrt_double)
    directory = tmp_path / "engine"
    shutil.copytree(acting_engine, directory)
    model, profiles = directory / "llm" / "model.onnx", make_profiles(EngineConfig.load(directory))["llm"]
    build_plan(model, profiles, PlanOptions(), tensorrt_double, ["host"])
    return directory


def test_an_unknown_decode_backend_is_an_error_that_lists_the_backends(tiny_engine):
    with pytest.raises(ValueError, match=f"unknown backend 'tensorflow', .*{', '.join(BACKENDS)}"):
        LLMInferenceRuntime(tiny_engine, "cpu", decode_backend="tensorflow")


def test_decoding_on_onnxruntime_gives_the_same_bits_as_without_a_choice(acting_engine, acting_runtime):
    with LLMInferenceRuntime(
        acting_engine, "cpu", prefix_cache_bytes=0, decode_backend="onnxruntime"
    ) as runtime:
        assert runtime.pipeline.runner._decode is not runtime.pipeline.runner._prefill
        answers = runtime.handle_request(BATCH)
    for answer, expected in zip(answers, acting_runtime.handle_request(BATCH), strict=True):
        assert_same_bits(answer, expected)


@pytest.mark.slow
@pytest.mark.parametrize("recorded", [False, True], ids=["step by step", "recorded steps"])
def test_prefill_by_onnxruntime_and_decode_by_tensorrt_answer_as_one_backend(
    tensorrt_engine, acting_runtime, monkeypatch, recorded
):
    runs = []
    run = TensorRTBackend.run
    monkeypatch.setattr(TensorRTBackend, "run", lambda *arguments: runs.append(1) or run(*arguments))
    with (
        queueing(),
        LLMInferenceRuntime(
            tensorrt_engine, WatchedDevice(), prefix_cache_bytes=0, decode_backend="tensorrt"
        ) as runtime,
    ):
        assert not recorded or runtime.capture_decoding_cuda_graph()
        answers = [*map(runtime.handle_request, BATCH), *runtime.handle_request(BATCH)]
    assert runs
    for answer, one in zip(answers, 2 * BATCH, strict=True):
        assert_same_answer(answer, acting_runtime.handle_request(one))
