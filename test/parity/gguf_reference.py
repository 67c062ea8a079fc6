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
def logits_of(model: Any, prompt: list[int], answer: list[int]) -> np.ndarray:
    """Return the logits [n, V] that the n tokens of an answer are chosen from.

    One run of the model computes all of them.
    """
    out = model(torch.tensor([prompt + answer[:-1]]), use_cache=False, logits_to_keep=len(answer))
    return out.logits[0].numpy()


def assert_same(
    runtime: LLMInferenceRuntime,
    model: Any,
    one: LLMGenerationRequest,
    stops: Sequence[int],
    tolerance: float,
) -> LLMGenerationResponse:
    """Compare tokens and log-probabilities of a greedy answer; return the answer.

    Each token must be the most likely one after those before it. The answer must end with its first stop token
    or after as many tokens as were asked for.
    transformers gets our token ids, since it drops the pre-tokenizer of a file.
    """
    answer = runtime.handle_request(one)
    tokens = list(answer.token_ids)
    logits = logits_of(model, runtime.base_model_input_token_ids[0], tokens)
    assert tokens == logits.argmax(-1).tolist()
    assert not {*tokens[:-1]} & {*stops}
    assert len(tokens) == one.sampling.max_tokens or tokens[-1] in stops
    expected = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    expected = expected - logits.max(-1, keepdims=True)
    for row, found in zip(expected, answer.logprobs, strict=True):
        for token, value in found:
            assert value == pytest.approx(row[token], abs=tolerance)
    return answer
