# SPDX-License-Identifier: Apache-2.0
"""Images in a hybrid model: batches with and without them, and turns.

The turns continue a saved state.
"""

from __future__ import annotations

import shutil
from unittest import mock

import numpy as np
import pytest

from edgellm_ros.builder import export
from edgellm_ros.runtime.conversation import ImagePart, Message, TextPart
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, LLMGenerationResponse, SamplingParams
from fixtures.conversations import TEMPLATES
from fixtures.qwen3_5_checkpoint import write_whole_qwen3_5_checkpoint
from fixtures.reference_inputs import make_image

pytestmark = pytest.mark.slow
ONE, OTHER, WIDE = make_image(48, 64), make_image(131, 33), make_image(20, 150)
BATCH = [((ONE,), 12), ((), 3), ((OTHER, WIDE), 5), ((ONE, OTHER), 12)]  # images and most tokens of an answer
TURNS = [[ONE, "what is this?"], ["where?"], ["and ", OTHER, " this?"], ["and now?"]]
# What the template writes between the words and the answer, as characters: a special token is one of them.
AROUND = len(">\n<assistant\n")


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3_5")
    checkpoint = write_whole_qwen3_5_checkpoint(folder / "checkpoint")
    export(checkpoint, folder / "engine", max_input_len=384, max_kv_cache_capacity=416)
    return folder / "engine"


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The engine with the published chat template.

    The template begins an answer with empty reasoning.
    """
    folder = tmp_path_factory.mktemp("published")
    checkpoint = write_whole_qwen3_5_checkpoint(folder / "checkpoint")
    shutil.copyfile(TEMPLATES / "qwen3_5.jinja", checkpoint / "chat_template.jinja")
    export(checkpoint, folder / "engine", max_input_len=384, max_kv_cache_capacity=416)
    return folder / "engine"


@pytest.fixture(scope="module")
def recomputing(engine, runtime_device):
    with LLMInferenceRuntime(engine, runtime_device, prefix_cache_bytes=0) as runtime:
        yield runtime


@pytest.fixture
def reusing(engine, runtime_device):
    with LLMInferenceRuntime(engine, runtime_device) as runtime:
        yield runtime


def requests() -> list[LLMGenerationRequest]:
    return [
        LLMGenerationRequest("go", images=images, sampling=SamplingParams(max_tokens=limit), logprobs=3)
        for images, limit in BATCH
    ]


def ask(messages: list[Message]) -> LLMGenerationRequest:
    return LLMGenerationRequest(messages=list(messages), sampling=SamplingParams(max_tokens=10), logprobs=3)


def turn(*parts) -> Message:
    return Message("user", [TextPart(part) if isinstance(part, str) else ImagePart(part) for part in parts])


def assert_same(found: LLMGenerationResponse, expected: LLMGenerationResponse) -> None:
    """Compare tokens, and log-probabilities up to rounding."""
    assert found.token_ids == expected.token_ids
    values = [np.array(answer.logprobs)[..., 1] for answer in (found, expected)]
    np.testing.assert_allclose(*values, atol=1e-3, rtol=0)


@pytest.fixture(scope="module")
def alone(recomputing) -> list[LLMGenerationResponse]:
    return [recomputing.handle_request(request) for request in requests()]


def test_a_batch_with_and_without_images_is_answered_as_alone(recomputing, alone):
    assert len({tuple(answer.token_ids) for answer in alone}) == len(alone)
    for answers, expected in (
        (recomputing.handle_request(requests()), alone),
        (recomputing.handle_request(requests()[::-1]), alone[::-1]),
    ):
        for found, one in zip(answers, expected, strict=True):
            assert_same(found, one)


def test_recorded_steps_after_images_give_the_same_answers(reusing, alone):
    reusing.capture_decoding_cuda_graph()
    for found, one in zip(reusing.handle_request(requests()), alone, strict=True):
        assert_same(found, one)


def converse(reusing: LLMInferenceRuntime, recomputing: LLMInferenceRuntime) -> list[int]:
    """Compare answers about two images; return how many tokens each turn computed."""
    messages, computed = [], []
    for parts in TURNS:
        messages.append(turn(*parts))
        found = reusing.handle_request(ask(messages))
        assert_same(found, recomputing.handle_request(ask(messages)))
        computed.append(found.prompt_tokens - found.reused_tokens)
        messages.append(Message("assistant", found.text))
    return computed


def new_tokens(runtime: LLMInferenceRuntime, around: int) -> list[int]:
    """Return the number of new tokens of each turn after the first.

    `around`: how many of them the template writes around the words.
    """
    height, width = runtime.pipeline.vision.token_grid(OTHER)
    words = [len("where?"), len("and < this?>") + height * width, len("and now?")]
    return [count + around for count in words]


def test_each_turn_computes_its_new_tokens_only_and_answers_as_from_the_beginning(reusing, recomputing):
    assert converse(reusing, recomputing)[1:] == new_tokens(reusing, AROUND)
    assert reusing.multimodal_metrics.total_images == 2


def test_a_template_that_leaves_out_earlier_reasoning_computes_new_tokens_only(published, runtime_device):
    with (
        LLMInferenceRuntime(published, runtime_device, prefix_cache_bytes=0) as recomputing,
        LLMInferenceRuntime(published, runtime_device) as reusing,
    ):
        around = AROUND + len("<think>\n\n</think>\n\n")
        assert converse(reusing, recomputing)[1:] == new_tokens(reusing, around)


def test_storing_a_turn_that_the_template_rewrites_encodes_no_image_again(published, runtime_device):
    requests = [ask([turn("look ", image, "what is it?")]) for image in (ONE, OTHER)]
    with LLMInferenceRuntime(published, runtime_device) as runtime:
        vision = runtime.pipeline.vision
        with mock.patch.object(vision, "encode", wraps=vision.encode) as encode:
            answers = runtime.handle_request(requests)
        assert encode.call_count == runtime.multimodal_metrics.total_images == 2
        following = [
            ask([*request.messages, Message("assistant", answer.text), turn("where?")])
            for request, answer in zip(requests, answers, strict=True)
        ]
        found = runtime.handle_request(following)
        assert runtime.multimodal_metrics.total_images == 2
        runtime.clear_prefix_cache()
        for one, alone in zip(found, following, strict=True):
            assert_same(one, runtime.handle_request(alone))


def test_conversations_about_different_images_of_one_batch_are_continued_by_the_next(reusing, recomputing):
    starts = [[turn("look ", image, "what is it?")] for image in (ONE, OTHER, WIDE)]
    answers = reusing.handle_request([ask(messages) for messages in starts])
    assert len({tuple(answer.token_ids) for answer in answers}) == len(answers)
    continued = [
        ask([*messages, Message("assistant", answer.text), turn("where?")])
        for messages, answer in zip(starts, answers, strict=True)
    ]
    for found, request in zip(reusing.handle_request(continued), continued, strict=True):
        assert found.prompt_tokens - found.reused_tokens == len("where?") + AROUND
        assert_same(found, recomputing.handle_request(request))


def test_a_state_after_another_image_is_not_reused(reusing, recomputing):
    answer = reusing.handle_request(ask([turn(ONE, "what is it?")]))
    messages = [turn(ONE[:, ::-1].copy(), "what is it?"), Message("assistant", answer.text), turn("where?")]
    found = reusing.handle_request(ask(messages))
    assert found.reused_tokens == 0
    assert_same(found, recomputing.handle_request(ask(messages)))
