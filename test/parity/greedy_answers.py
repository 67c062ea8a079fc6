# SPDX-License-Identifier: Apache-2.0
"""Greedy answers of the runtime against those of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from edgellm_ros.runtime.request import LLMGenerationResponse

TOLERANCE = 1e-3
TOKENS = 16


def check_greedy_answer(
    found: LLMGenerationResponse, model: Any, inputs: dict[str, Any], tokens: int = TOKENS
) -> None:
    """Check tokens and log-probabilities of a greedy answer to a prompt.

    `inputs`: the prompt as transformers' model takes it, one row. `tokens`: the answer's largest number of
    tokens.
    """
    ids = inputs["input_ids"]
    answer = model.generate(
        **{**inputs, "attention_mask": torch.ones_like(ids)},  # else it masks ids like the padding
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.cat(answer.logits)
    assert found.token_ids == answer.sequences[0, ids.shape[1] :].tolist()
    assert logits.abs().max() > 0.5
    for entries, row in zip(found.logprobs, logits.double().log_softmax(-1), strict=True):
        chosen, values = zip(*entries, strict=True)
        np.testing.assert_allclose(values, row[list(chosen)], atol=TOLERANCE, rtol=0)


@torch.no_grad()
def greedy_logits(
    model: Any, prompt: Sequence[int], answer: Sequence[int], most: int, stops: Sequence[int]
) -> torch.Tensor:
    """Check that an answer of n tokens is greedy; return its logits [n, V].

    Each token must be the most likely one after those before it, which one run of transformers' model tells.
    The answer must end with its first stop token or after `most` tokens.
    """
    ids = torch.tensor([[*prompt, *answer[:-1]]])
    logits = model(ids, use_cache=False, logits_to_keep=len(answer)).logits[0]
    assert list(answer) == logits.argmax(-1).tolist()
    assert not {*answer[:-1]} & {*stops}
    assert len(answer) == most or answer[-1] in stops
    return logits
