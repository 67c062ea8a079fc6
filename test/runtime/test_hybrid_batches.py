# SPDX-License-Identifier: Apache-2.0
"""Hybrids with any number of recurrent heads in batches."""

from __future__ import annotations

import pytest

from edgellm_ros.builder import export
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams
from fixtures.hybrid_checkpoints import write_nemotron_h_checkpoint, write_qwen3_5_checkpoint
from fixtures.requests_for_tests import assert_same_answer

pytestmark = [pytest.mark.slow, pytest.mark.only_on("cpu", reason="a GPU gives numbers up to rounding")]
LIMITS = {"go": 8, "go to the red box and then turn left at the door " * 2: 5, "turn": 7, "to the door": 6}
BATCHES = ([0, 1], [3, 2], [1, 2, 3], [0, 1, 2, 3])


def nemotron_h(directory, heads: int):
    groups = 2 if heads % 2 == 0 else 1
    return write_nemotron_h_checkpoint(directory, heads, mamba_num_heads=heads, n_groups=groups)


def qwen3_5(directory, heads: int):
    keys = 2 if heads % 2 == 0 else 1
    changes = {"linear_num_value_heads": heads, "linear_num_key_heads": keys}
    return write_qwen3_5_checkpoint(directory, heads, **changes)


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("write", [nemotron_h, qwen3_5])
def test_answers_have_the_same_bits_in_batches_of_1_to_4(write, heads, tmp_path, runtime_device):
    export(write(tmp_path / "checkpoint", heads), tmp_path / "engine")
    requests = [
        LLMGenerationRequest(
            text, sampling=SamplingParams(max_tokens=limit, temperature=1.0, seed=seed), logprobs=3
        )
        for seed, (text, limit) in enumerate(LIMITS.items())
    ]
    with LLMInferenceRuntime(tmp_path / "engine", runtime_device, prefix_cache_bytes=0) as runtime:
        alone = [runtime.handle_request(request) for request in requests]
        for batch in BATCHES:
            answers = runtime.handle_request([requests[index] for index in batch])
            for index, answer in zip(batch, answers, strict=True):
                assert_same_answer(answer, alone[index])
