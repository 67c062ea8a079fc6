# SPDX-License-Identifier: Apache-2.0
"""An FP8 KV cache against transformers.

PyTorch rounds the keys and values of transformers to E4M3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from text_families import LIMITS, MAX_TOKENS, PROMPTS, write_checkpoint  # noqa: E402

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams  # noqa: E402

# A value that lies between two of E4M3 may be rounded to either: sums in another order are not the same.
TOLERANCE = 2e-2
EFFECT = 0.1  # the rounding changes some log probability by more than this


class RoundedCache(transformers.DynamicCache):
    """Rounds keys and values as an FP8 cache without scales does."""

    def update(self, keys, values, *args, **kwargs):
        return super().update(self.rounded(keys), self.rounded(values), *args, **kwargs)

    @staticmethod
    def rounded(rows: torch.Tensor) -> torch.Tensor:
        return rows.clamp(-448, 448).to(torch.float8_e4m3fn).to(rows.dtype)


@dataclass(frozen=True)
class Case:
    runtime: LLMInferenceRuntime
    reference: transformers.PreTrainedModel

    def log_probabilities(self, ids: list[int], cache: transformers.DynamicCache) -> np.ndarray:
        with torch.no_grad():
            logits = self.reference(torch.tensor([ids]), past_key_values=cache).logits[0]
        return torch.log_softmax(logits, -1).numpy()


@pytest.fixture(scope="module", params=[("qwen3", 0), ("mistral", 0)], ids=lambda case: case[0])
def case(request, tmp_path_factory, runtime_device) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp(request.param[0])
    checkpoint = write_checkpoint(folder / "checkpoint", *request.param)
    export(checkpoint.directory, folder / "engine", kv_cache="fp8", **LIMITS)
    with LLMInferenceRuntime(folder / "engine", runtime_device) as runtime:
        yield Case(runtime, checkpoint.reference())


def test_log_probabilities_are_those_of_rounded_keys_and_values(case):
    effect = 0.0
    for prompt in PROMPTS:
        request = LLMGenerationRequest(prompt, sampling=SamplingParams(max_tokens=MAX_TOKENS), logprobs=5)
        answer = case.runtime.handle_request(request)
        prompt_ids = case.runtime.base_model_input_token_ids[0]
        ids = [*prompt_ids, *answer.token_ids]
        rows = range(len(prompt_ids) - 1, len(ids) - 1)
        rounded = case.log_probabilities(ids, RoundedCache())
        exact = case.log_probabilities(ids, transformers.DynamicCache())
        for row, found in zip(rows, answer.logprobs, strict=True):
            tokens, values = (list(each) for each in zip(*found, strict=True))
            np.testing.assert_allclose(values, rounded[row, tokens], atol=TOLERANCE, rtol=0)
            effect = max(effect, float(np.abs(exact[row, tokens] - values).max()))
    assert effect > EFFECT
