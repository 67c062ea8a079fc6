# SPDX-License-Identifier: Apache-2.0
"""Greedy answers of GGUF files by transformers, which dequantises them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from greedy_answers import greedy_logits

from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, LLMGenerationResponse


def load(path: Path) -> Any:
    """Load a GGUF file with transformers.

    transformers reads the file twice, and asks for the same table of names once for each of its modules. Here
    it gets the first answer again: of a model with 272 tensors, that was half of the processor time.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        return transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()


def assert_same(
    runtime: LLMInferenceRuntime,
    model: Any,
    one: LLMGenerationRequest,
    stops: Sequence[int],
    tolerance: float,
) -> LLMGenerationResponse:
    """Compare tokens and log-probabilities of a greedy answer; return the answer.

    transformers gets our token ids, since it drops the pre-tokenizer of a file.
    """
    answer = runtime.handle_request(one)
    prompt = runtime.base_model_input_token_ids[0]
    logits = greedy_logits(model, prompt, answer.token_ids, one.sampling.max_tokens, stops).numpy()
    expected = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    expected = expected - logits.max(-1, keepdims=True)
    for row, found in zip(expected, answer.logprobs, strict=True):
        for token, value in found:
            assert value == pytest.approx(row[token], abs=tolerance)
    return answer
