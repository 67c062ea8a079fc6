# SPDX-License-Identifier: Apache-2.0
"""Requests whose prompt is given as token ids, without a chat template."""

from __future__ import annotations

import pytest

from edgellm_ros.runtime.conversation import Message
from edgellm_ros.runtime.request import LLMGenerationRequest
from fixtures.requests_for_tests import IMAGE, assert_same_answer, request


def test_the_ids_of_a_rendered_prompt_are_answered_as_the_prompt(runtime):
    asked = request("go to the red box", logprobs=2)
    ids = tuple(runtime.pipeline.prepare([asked], 0)[0].token_ids)
    given = request("", prompt_ids=ids, logprobs=2)
    answer = runtime.handle_request(given)
    assert answer.prompt_tokens == len(ids)
    assert_same_answer(answer, runtime.handle_request(asked))


def test_ids_are_continued_without_a_template(runtime):
    assert runtime.handle_request(request("", prompt_ids=(5, 6, 7))).prompt_tokens == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_ids": "ab"}, "prompt_ids must be a sequence of token ids, got str"),
        ({"prompt_ids": [1, -1]}, r"prompt_ids\[1\] must be an integer from 0 to"),
        ({"prompt_ids": [1.5]}, r"prompt_ids\[0\] must be an integer from 0 to"),
        ({"prompt_ids": [1], "prompt": "a"}, "prompt_ids or prompt, not both"),
        ({"prompt_ids": [1], "images": (IMAGE,)}, "prompt_ids or images, not both"),
        ({"prompt_ids": [1], "messages": (Message("user", "a"),)}, "prompt_ids or messages, not both"),
    ],
)
def test_wrong_ids_are_refused_by_the_request(fields, message):
    with pytest.raises(ValueError, match=message):
        LLMGenerationRequest(**fields)


def test_wrong_ids_are_refused_by_the_engine(runtime):
    tokens = runtime.config.special_tokens
    with pytest.raises(ValueError, match=r"prompt_ids\[1\]: the model has \d+ tokens, got 1000000"):
        runtime.handle_request(request("", prompt_ids=(1, 1_000_000)))
    for token in (tokens.image_token_id, tokens.audio_token_id, runtime.config.expert.history_token_id):
        with pytest.raises(ValueError, match=rf"prompt_ids\[0\]: {token} stands for an image"):
            runtime.handle_request(request("", prompt_ids=(token,)))
