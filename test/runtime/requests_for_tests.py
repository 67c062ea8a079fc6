# SPDX-License-Identifier: Apache-2.0
"""Requests, and what it means that two answers are the same."""

from __future__ import annotations

import dataclasses

import numpy as np
import on_device
from on_device import ROUNDING, assert_same_up_to_rounding
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


def assert_same_bits(one, other) -> None:
    """Everything but the metrics, bit by bit, on every device."""
    _assert_same(one, other, np.testing.assert_array_equal)
    assert one.logprobs == other.logprobs


def assert_same_answer(one, other) -> None:
    """Everything but the metrics, for answers that were computed in different batches or pieces.

    Bit by bit on the CPU; elsewhere words and tokens equal, numbers up to rounding.
    """
    if on_device.chosen == "cpu":
        assert_same_bits(one, other)
        return
    _assert_same(one, other, assert_same_up_to_rounding)
    assert (one.logprobs is None) == (other.logprobs is None)
    for first, second in zip(one.logprobs or (), other.logprobs or (), strict=True):
        values = [[value for _, value in entries] for entries in (first, second)]
        np.testing.assert_allclose(*values, atol=ROUNDING, rtol=ROUNDING)
        known = dict(second)  # of two that are equally likely either may come first
        shared = [(value, known[token]) for token, value in first if token in known]
        assert len(shared) >= len(first) - 1
        np.testing.assert_allclose(*zip(*shared, strict=True), atol=ROUNDING, rtol=ROUNDING)


def _assert_same(one, other, assert_same_numbers) -> None:
    for name in ("text", "token_ids", "finish_reason", "prompt_tokens", "noise_seed"):
        assert getattr(one, name) == getattr(other, name), name
    for name in ("actions", "paths"):
        first, second = getattr(one, name), getattr(other, name)
        assert (first is None) == (second is None), name
        if first is not None:
            assert_same_numbers(first, second)
