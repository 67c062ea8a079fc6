# SPDX-License-Identifier: Apache-2.0
"""Odd valid requests do not change others of a batch; invalid ones are refused."""

import numpy as np
import pytest

from edgellm_ros.builder import export
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import MAX_SPEED
from edgellm_ros.runtime.sampling_params import SAMPLED
from fixtures.requests_for_tests import IMAGE, assert_same_answer, assert_same_bits, request
from fixtures.tiny_checkpoint import write_tiny_checkpoint

TEMPERATURE, PENALTY = SAMPLED["temperature"], SAMPLED["repetition_penalty"]
NEIGHBOUR = request("what do you see?", images=(IMAGE,), temperature=0.9, seed=7, logprobs=2, max_tokens=10)
ODD = {
    "tiny top_p": request(temperature=1.0, top_p=1e-30),
    "min_p 1": request(temperature=1.0, min_p=1.0),
    "min_p below float32": request(temperature=1.0, min_p=1e-300),
    "largest top_k": request(temperature=1.0, top_k=2**31 - 1),
    "smallest penalty": request(repetition_penalty=PENALTY.least),
    "largest penalty": request(temperature=1.0, repetition_penalty=PENALTY.most),
    "smallest temperature": request(temperature=TEMPERATURE.least, min_p=0.5, top_p=0.5),
    "largest temperature": request(temperature=TEMPERATURE.most, top_p=0.99),
    "everything at once": request(
        temperature=TEMPERATURE.least, repetition_penalty=PENALTY.least, top_p=1e-30, min_p=1.0, top_k=1
    ),
    "no text": request("", images=(IMAGE,)),
    "one token": request("a", max_tokens=1),
    "largest seed": request(temperature=1.0, seed=2**64 - 1, max_tokens=2**31 - 1),
    "a stop string that is the whole answer": request(stop=tuple(map(chr, range(32, 127)))),
    "noncharacters": request("\ufdd0\ufddf\uffff\x00 <|im_end|>"),
    "highest speed": request(speed=MAX_SPEED, action_samples=1),
}


@pytest.mark.parametrize("name", ODD)
def test_neighbours_of_odd_requests_get_the_answer_they_get_alone(runtime, name):
    alone = [runtime.handle_request(one) for one in (ODD[name], NEIGHBOUR)]
    for together in (
        runtime.handle_request([ODD[name], NEIGHBOUR]),
        runtime.handle_request([NEIGHBOUR, ODD[name]])[::-1],
    ):
        for one, other in zip(alone, together, strict=True):
            assert_same_answer(one, other)


def bare_engine(directory, template: str):
    """Export an engine with this chat template, without action head and audio encoder."""
    checkpoint = write_tiny_checkpoint(directory / "checkpoint", action_expert=False, audio_weights=False)
    (checkpoint / "chat_template.jinja").write_text(template)
    export(checkpoint, directory / "engine")
    return directory / "engine"


@pytest.fixture(scope="module")
def bare(runtime_device, tmp_path_factory):
    """A runtime whose chat template is the text of the prompt alone."""
    source = "{% for m in messages %}{{ m.content[-1].text }}{% endfor %}"
    engine = bare_engine(tmp_path_factory.mktemp("bare"), source)
    with LLMInferenceRuntime(engine, runtime_device, prefix_cache_bytes=0) as runtime:
        yield runtime


def test_a_prompt_of_no_tokens_is_refused_before_any_work(bare):
    alone = bare.handle_request(request("go"))
    for empty in (request(""), request("", system_prompt="")):
        with pytest.raises(ValueError, match=r"^the prompt has 0 tokens: the chat template rendered"):
            bare.handle_request(empty)
    with pytest.raises(ValueError, match=r"^request 1: the prompt has 0 tokens"):
        bare.handle_request([request("go"), request("")])
    assert_same_bits(bare.handle_request(request("go")), alone)


def test_prompts_of_one_token_do_not_change_their_neighbours(bare):
    requests = [request("a"), request("what do you see in front of you?"), request("b", temperature=1.0)]
    alone = [bare.handle_request(one) for one in requests]
    assert [answer.prompt_tokens for answer in alone][::2] == [1, 1]
    for one, other in zip(alone, bare.handle_request(requests), strict=True):
        assert_same_answer(one, other)


def test_a_system_prompt_that_is_no_prefix_of_prompts_is_refused(runtime_device, tmp_path):
    source = "{{ messages[-1].content[-1].text }}{{ messages[0].content }}"
    engine = bare_engine(tmp_path, source)
    with LLMInferenceRuntime(engine, runtime_device) as runtime:
        with pytest.raises(ValueError, match="no prompt begins with this system prompt"):
            runtime.gen_and_save_system_prompt_kv_cache("be brief")
        assert runtime.handle_request(request("go")).prompt_tokens


@pytest.mark.parametrize("scale", [1e6, 1e300])
def test_a_history_that_is_too_fast_is_refused_before_any_work(runtime, scale):
    points = runtime.config.action.trajectory_history.num_points
    history = np.arange(points)[:, None] * np.array([[scale / points, 0.0]])
    with pytest.raises(
        ValueError, match=r"^request 1: the speed of the history must be a number from 0 to 1000"
    ):
        runtime.handle_request([NEIGHBOUR, request(history=history, action_samples=1)])
    answered = runtime.handle_request(request(history=history, speed=1.0, max_tokens=2))
    assert answered.token_ids
