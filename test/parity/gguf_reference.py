# SPDX-License-Identifier: Apache-2.0
"""Greedy answers of GGUF files by transformers, which dequantises them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, LLMGenerationResponse


def load(path: Path) -> Any:
    """Load a GGUF file with transformers."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()


@torch.no_grad()
def greedy(model: Any, ids: list[int], count: int, stops: Sequence[int]) -> tuple[list[int], np.ndarray]:
    """Return greedy tokens, the stop token included, and their logits [n,V]."""
    out = model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
    tokens, logits = [], []
    while True:
        logits.append(out.logits[0, -1].numpy())
        tokens.append(int(logits[-1].argmax()))
        if len(tokens) == count or tokens[-1] in stops:
            return tokens, np.stack(logits)
        out = model(torch.tensor([[tokens[-1]]]), past_key_values=out.past_key_values, use_cache=True)


def assert_same(
    runtime: LLMInferenceRuntime,
    model: Any,
    one: LLMGenerationRequest,
    stops: Sequence[int],
    tolerance: float,
) -> LLMGenerationResponse:
    """Compare tokens and log-probabilities of an answer; return the answer.

    transformers gets our token ids, since it drops the pre-tokenizer of a file.
    """
    answer = runtime.handle_request(one)
    ids = runtime.base_model_input_token_ids[0]
    tokens, logits = greedy(model, ids, one.sampling.max_tokens, stops)
    assert answer.token_ids == tokens
    expected = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    expected = expected - logits.max(-1, keepdims=True)
    for row, found in zip(expected, answer.logprobs, strict=True):
        for token, value in found:
            assert value == pytest.approx(row[token], abs=tolerance)
    return answer
