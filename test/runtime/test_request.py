# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest

from edgellm_ros.runtime.request import LLMGenerationRequest
from edgellm_ros.runtime.sampling_params import SAMPLED, SamplingParams


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"temperature": -0.1}, r"temperature must be 0 or a number from 1e-06 to 1e\+06, got -0.1"),
        ({"temperature": 1e39}, r"temperature must be 0 or a number from 1e-06 to 1e\+06, got 1e\+39"),
        ({"temperature": 1e-40}, r"temperature must be 0 or a number from 1e-06 to 1e\+06, got 1e-40"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_p": 1.1}, "top_p must be a number from 1e-30 to 1, got 1.1"),
        ({"top_p": 0.0}, "top_p must be a number from 1e-30 to 1, got 0.0"),
        ({"top_p": 1e-50}, "top_p must be a number from 1e-30 to 1, got 1e-50"),
        ({"top_p": complex(1)}, "top_p must be a number"),
        ({"min_p": -1.0}, "min_p"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty must be a number from 1e-06 to 1e\+06, got 0.0"),
        ({"repetition_penalty": 1e-50}, "repetition_penalty must be a number from 1e-06"),
        ({"repetition_penalty": 1e39}, "repetition_penalty must be a number from 1e-06"),
        ({"top_k": -1}, "top_k must be an integer from 0"),
        ({"top_k": 2.5}, "top_k must be an integer"),
        ({"max_tokens": 0}, "max_tokens must be an integer from 1"),
        ({"seed": -1}, "seed must be an integer from 0 to 18446744073709551615, got -1"),
        ({"seed": 2**64}, "seed"),
        ({"stop": "end"}, "stop must be a sequence of non-empty strings, got 'end'"),
        ({"stop": ["end", ""]}, "non-empty"),
        ({"stop": None}, "stop must be a sequence of non-empty strings, got None"),
        ({"stop": 5}, "stop must be a sequence of non-empty strings, got 5"),
        ({"stop": {"a": 1}}, "stop must be a sequence of non-empty strings, got {'a': 1}"),
        ({"choices": None}, "choices must be a sequence of non-empty strings, got None"),
        ({"choices": {"a": 1}}, "choices must be a sequence of non-empty strings, got {'a': 1}"),
        ({"choices": {"a"}}, "choices must be a sequence of non-empty strings, got {'a'}"),
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
        ({"prompt": "x", "speed": -1.0}, "speed must be a number from 0 to 1000, got -1.0"),
        ({"prompt": "x", "speed": math.inf}, "speed must be a number from 0 to 1000, got inf"),
        ({"prompt": "x", "sampling": {"top_k": 3}}, "sampling must be SamplingParams, got dict"),
        ({"prompt": "x", "images": None}, "images must be a sequence of images, got NoneType"),
        ({"prompt": "x", "videos": None}, "videos must be a sequence of Videos, got NoneType"),
        ({"prompt": "x", "audio": None}, "audio must be a sequence of Sounds, got NoneType"),
        ({"prompt": "x", "cameras": 5}, "cameras must be a sequence of names, got 5"),
        ({"prompt": "x", "cameras": None}, "cameras must be a sequence of names, got None"),
        ({"prompt": "x", "previous_chunk": [[0.0]]}, "previous_chunk must be a ChunkCondition, got list"),
    ],
)
def test_wrong_requests_are_errors_that_name_the_value(parameters, message):
    with pytest.raises(ValueError, match=message):
        LLMGenerationRequest(**parameters)


def test_lists_are_accepted_and_stored_as_tuples():
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert LLMGenerationRequest("x", images=[]).images == ()


@pytest.mark.parametrize("name", [name for name, how in SAMPLED.items() if isinstance(how.least, float)])
def test_every_accepted_bound_is_a_normal_float32(name):
    for bound in (SAMPLED[name].least, SAMPLED[name].most, np.float32(1.0), 1):
        SamplingParams(**{name: bound})
        assert np.isfinite(np.float32(bound))
        assert bound == 0 or np.float32(bound) >= np.finfo(np.float32).tiny


def test_numbers_of_numpy_are_accepted():
    sampling = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), top_p=np.float64(0.9))
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 3, 0.9)
