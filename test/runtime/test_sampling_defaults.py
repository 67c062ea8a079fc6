# SPDX-License-Identifier: Apache-2.0
"""Sampling that a request leaves out is that of generation_config.json."""

from __future__ import annotations

import dataclasses

import pytest

from edgellm_ros.engine_directory.config import EngineConfig, GenerationDefaults
from edgellm_ros.kernels import RULES
from edgellm_ros.runtime import sampling_params
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams
from fixtures.sampled_answers import PROMPT, SAMPLED, TOKENS

OFF = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
DEFAULTS = GenerationDefaults(**SAMPLED)


@pytest.fixture(scope="module")
def runtime(sampling_engine, device):
    with LLMInferenceRuntime(sampling_engine, device) as runtime:
        yield runtime


def answer(runtime, **sampling: object) -> list[int]:
    sampling = SamplingParams(max_tokens=TOKENS, **sampling)
    return runtime.handle_request(LLMGenerationRequest(PROMPT, sampling=sampling)).token_ids


def test_the_kernels_sample_by_every_rule_and_the_seed():
    assert set(RULES) == {*sampling_params.SAMPLED, "seed"}


def test_the_engine_directory_has_the_checkpoints_defaults(sampling_engine):
    assert EngineConfig.load(sampling_engine).generation == DEFAULTS


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_request_without_sampling_is_sampled_as_the_checkpoint_says(runtime, seed):
    assert answer(runtime, seed=seed) == answer(runtime, **SAMPLED, min_p=0.0, seed=seed)


@pytest.mark.parametrize("name", SAMPLED)
def test_each_value_of_a_request_goes_before_the_checkpoints(runtime, name):
    given = {name: OFF[name]}
    found = [answer(runtime, **given, seed=seed) for seed in range(4)]
    assert found == [answer(runtime, **{**SAMPLED, **given}, seed=seed) for seed in range(4)]
    assert found != [answer(runtime, seed=seed) for seed in range(4)]


def test_an_explicit_temperature_of_0_is_greedy(runtime):
    assert answer(runtime, temperature=0.0, seed=1) == answer(runtime, temperature=0.0, seed=2)


def test_a_checkpoint_without_do_sample_answers_greedily(tiny_engine, device):
    with LLMInferenceRuntime(tiny_engine, device) as runtime:
        assert answer(runtime, seed=3) == answer(runtime, **OFF, min_p=0.0)


def test_resolved_parameters_keep_everything_else():
    sampling = SamplingParams(max_tokens=3, stop=("a",), seed=7, choices=("b", "c"), top_k=4)
    resolved = sampling.resolved(DEFAULTS)
    expected = {**SAMPLED, "top_k": 4, "min_p": 0.0}
    assert resolved == dataclasses.replace(sampling, **expected)
    assert resolved.grammar is sampling.grammar
    assert sampling.temperature is None


def test_a_default_of_the_checkpoint_that_cannot_be_sampled_with_is_named():
    message = "^generation_config.json of the checkpoint: temperature must be 0 or a number from 1e-06 "
    with pytest.raises(ValueError, match=message):
        SamplingParams().resolved(GenerationDefaults(temperature=1e-9))
