# SPDX-License-Identifier: Apache-2.0
"""Images of the first request are encoded while the host makes its prompt."""

from __future__ import annotations

import threading

import pytest

from doubles.deferred_runtime import WatchedDevice, queueing
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.multimodal.vision_runner import VisionRunner
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request_preparer import RequestPreparer
from fixtures.requests_for_tests import IMAGE, OTHER_IMAGE, request

pytestmark = pytest.mark.only_on("cpu", reason="these tests bring their own device")


@pytest.fixture(scope="module", autouse=True)
def _queueing():
    with queueing():
        yield


@pytest.fixture
def runtime(tiny_engine):
    with LLMInferenceRuntime(tiny_engine, WatchedDevice(), drafting=None) as opened:
        yield opened


@pytest.fixture
def order(monkeypatch):
    """Names of what happens, in order: "encode" and "prepare"."""
    events: list[str] = []
    for owner, name in ((VisionRunner, "encode"), (RequestPreparer, "prepare")):
        original = getattr(owner, name)

        def watched(*args, original=original, name=name):
            events.append(name)
            return original(*args)

        monkeypatch.setattr(owner, name, watched)
    return events


def test_a_new_image_is_encoded_before_the_prompt_is_made(runtime, order):
    runtime.handle_request(request(images=(IMAGE,)))
    assert order == ["encode", "prepare"]


def test_images_of_later_requests_follow_their_prompts(runtime, order):
    runtime.handle_request([request(images=(IMAGE,)), request(images=(OTHER_IMAGE,))])
    assert order == ["encode", "prepare", "encode"]


def test_an_image_in_the_prefix_cache_is_not_encoded_again(runtime, order):
    for text in ("go on", "go on, please"):
        runtime.handle_request(request(text, images=(IMAGE,)))
    assert order == ["encode", "prepare", "prepare"]


def test_an_image_that_has_left_the_prefix_cache_is_encoded_after_its_prompt(runtime, order):
    for _ in range(2):
        runtime.handle_request(request(images=(IMAGE,)))
        runtime.pipeline.reuse.clear()
    assert order == ["encode", "prepare", "prepare", "encode"]


def test_without_a_prefix_cache_every_image_is_encoded_before_its_prompt(tiny_engine, order):
    with LLMInferenceRuntime(tiny_engine, WatchedDevice(), drafting=None, prefix_cache_bytes=0) as runtime:
        for _ in range(2):
            runtime.handle_request(request(images=(IMAGE,)))
    assert order[-4:] == ["encode", "prepare"] * 2


def test_answers_are_those_without_images_ahead(runtime, tiny_engine):
    with LLMInferenceRuntime(tiny_engine, "cpu", drafting=None) as plain:
        for images in ((IMAGE, OTHER_IMAGE), (OTHER_IMAGE, IMAGE)):
            one = request("what is there", images=images)
            assert runtime.handle_request(one).token_ids == plain.handle_request(one).token_ids


def test_the_image_of_a_refused_request_is_not_that_of_the_next(runtime, tiny_engine):
    with pytest.raises(ValueError, match="unknown LoRA"):
        runtime.handle_request(request(images=(IMAGE,), lora="missing"))
    with LLMInferenceRuntime(tiny_engine, "cpu", drafting=None) as plain:
        asked = request(images=(OTHER_IMAGE,), max_tokens=8)
        assert runtime.handle_request(asked).token_ids == plain.handle_request(asked).token_ids


def test_a_request_is_refused_when_the_device_has_read_its_image(runtime):
    with pytest.raises(ValueError, match="unknown LoRA"):
        runtime.handle_request(request(images=(IMAGE,), lora="missing"))
    assert not runtime.pipeline.device.waiting()


def test_nothing_is_encoded_for_a_request_that_is_cancelled(runtime, order):
    cancel = threading.Event()
    cancel.set()
    runtime.handle_request(request(images=(IMAGE,), cancel=cancel))
    assert order == ["prepare"]


def test_a_failed_encoder_ends_the_batch_and_not_the_next(runtime, monkeypatch):
    asked = request(images=(IMAGE,))
    expected = runtime.handle_request(asked)
    runtime.pipeline.reuse.clear()

    def fail(*args):
        raise EngineError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(VisionRunner, "encode", fail)
        with pytest.raises(EngineError, match="no memory"):
            runtime.handle_request(request(images=(OTHER_IMAGE,)))
    assert runtime.handle_request(asked).token_ids == expected.token_ids
