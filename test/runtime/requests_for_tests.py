# SPDX-License-Identifier: Apache-2.0
"""Requests, and what it means that two answers are the same."""

from __future__ import annotations

import dataclasses

import numpy as np
from reference_inputs import make_image, make_sound

from edgellm_ros.multimodal.sound import Sound
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams

IMAGE = make_image(48, 64)
OTHER_IMAGE = make_image(60, 50)
SOUND = Sound(make_sound(2.5, 16000), 16000)
OTHER_SOUND = Sound(make_sound(0.7, 44100), 44100)


def request(prompt="go to the red box", max_tokens=12, **parameters) -> LLMGenerationRequest:
    """A request whose sampling parameters may be given beside the others."""
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    sampling = SamplingParams(max_tokens=max_tokens, **{k: v for k, v in parameters.items() if k in names})
    return LLMGenerationRequest(
        prompt, sampling=sampling, **{k: v for k, v in parameters.items() if k not in names}
    )


def assert_same_answer(one, other) -> None:
    """Bit by bit, everything but the metrics."""
    for name in ("text", "token_ids", "finish_reason", "prompt_tokens", "logprobs", "noise_seed"):
        assert getattr(one, name) == getattr(other, name), name
    for name in ("actions", "paths"):
        first, second = getattr(one, name), getattr(other, name)
        assert (first is None) == (second is None), name
        if first is not None:
            np.testing.assert_array_equal(first, second)
