# SPDX-License-Identifier: Apache-2.0
import math

import pytest

from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"temperature": -0.1}, "temperature must be a finite number of at least 0, got -0.1"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature must be a finite number of at least 0, got inf"),
        ({"top_p": 1.1}, "top_p must be a number from 0 to 1"),
        ({"top_p": 0.0}, "greater than 0"),
        ({"min_p": -1.0}, "min_p"),
        ({"repetition_penalty": 0.0}, "greater than 0"),
        ({"top_k": -1}, "top_k must be an integer from 0"),
        ({"top_k": 2.5}, "top_k must be an integer"),
        ({"max_tokens": 0}, "max_tokens must be an integer from 1"),
        ({"seed": -1}, "seed must be an integer from 0 to 18446744073709551615, got -1"),
        ({"seed": 2**64}, "seed"),
        ({"stop": "end"}, "stop must be a sequence of non-empty strings, got 'end'"),
        ({"stop": ["end", ""]}, "non-empty"),
        ({"temperature": "hot"}, "got 'hot'"),
        ({"top_k": True}, "got True"),
    ],
)
def test_wrong_sampling_parameters_are_errors_that_name_the_value(parameters, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**parameters)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"prompt": 5}, "prompt must be a string, got 5"),
        ({"prompt": "x", "logprobs": 51}, "logprobs must be an integer from 0 to 50"),
        ({"prompt": "x", "action_samples": -1}, "action_samples must be an integer from 0"),
        ({"prompt": "x", "denoise_steps": 0}, "denoise_steps must be an integer from 1 to 1000, got 0"),
        ({"prompt": "x", "denoise_steps": -5}, "denoise_steps"),
        ({"prompt": "x", "noise_seed": -1}, "noise_seed"),
        ({"prompt": "x", "speed": math.nan}, "speed"),
        ({"prompt": "x", "speed": -1.0}, "speed"),
    ],
)
def test_wrong_requests_are_errors_that_name_the_value(parameters, message):
    with pytest.raises(ValueError, match=message):
        LLMGenerationRequest(**parameters)


def test_lists_are_taken_where_tuples_are_kept():
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert LLMGenerationRequest("x", images=[]).images == ()
