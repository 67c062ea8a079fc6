# SPDX-License-Identifier: Apache-2.0
"""Adapters on the tiny checkpoint against recorded answers of PEFT.

record_adapters.py records the answers for machines without PEFT.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from adapters import ADAPTERS, LOGPROBS, MAX_RANK, MAX_TOKENS, PROMPT, write_adapters

from edgellm_ros.builder import export
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams

REFERENCES = json.loads(Path(__file__).parents[1].joinpath("data", "lora_references.json").read_text())


@pytest.fixture(scope="module")
def runtime(tiny_checkpoint, tmp_path_factory, runtime_device):
    root = tmp_path_factory.mktemp("adapters")
    export(tiny_checkpoint, root / "engine", max_lora_rank=MAX_RANK)
    directories = write_adapters(root, tiny_checkpoint)
    named = {name.replace(" ", "_"): directory for name, directory in directories.items()}
    with LLMInferenceRuntime(root / "engine", runtime_device, lora_dirs=named) as runtime:
        yield runtime


@pytest.mark.parametrize("name", ADAPTERS)
def test_runtime_answers_as_peft_did(runtime, name):
    recorded = REFERENCES["adapters"][name]
    response = runtime.handle_request(
        LLMGenerationRequest(
            PROMPT,
            lora=name.replace(" ", "_"),
            sampling=SamplingParams(max_tokens=MAX_TOKENS),
            logprobs=LOGPROBS,
        )
    )
    assert response.token_ids == recorded["token_ids"], "if the tiny checkpoint has changed: record again"
    for entries, ids, values in zip(
        response.logprobs, recorded["top_ids"], recorded["top_logprobs"], strict=True
    ):
        assert [token for token, _ in entries] == ids
        np.testing.assert_allclose([value for _, value in entries], values, atol=1e-3)
