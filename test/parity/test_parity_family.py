# SPDX-License-Identifier: Apache-2.0
"""A family of the tests' own, of the builder's shared parts, against transformers."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.builder.families import registered  # noqa: E402
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams  # noqa: E402
from fixtures.seed_oss_family import SEED_OSS, write_seed_oss_checkpoint  # noqa: E402

TOKENS = 16


@pytest.mark.parametrize("max_lora_rank", [0, 4])
def test_greedy_tokens_and_log_probabilities_match(tmp_path, runtime_device, max_lora_rank):
    checkpoint = write_seed_oss_checkpoint(tmp_path / "checkpoint")
    with registered(SEED_OSS):
        export(checkpoint, tmp_path / "engine", max_lora_rank=max_lora_rank)
    with LLMInferenceRuntime(tmp_path / "engine", runtime_device) as runtime:
        request = LLMGenerationRequest("go there", sampling=SamplingParams(max_tokens=TOKENS), logprobs=5)
        found = runtime.handle_request(request)
        prompt = torch.tensor(runtime.base_model_input_token_ids)
    model = transformers.SeedOssForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        whole = torch.cat([prompt, torch.tensor([found.token_ids])], dim=1)
        logits = model(whole).logits[0, prompt.shape[1] - 1 : -1]
    assert len(found.token_ids) > 4
    assert found.token_ids == logits.argmax(-1).tolist()
    for entries, row in zip(found.logprobs, logits.double().log_softmax(-1), strict=True):
        ids, values = zip(*entries, strict=True)
        np.testing.assert_allclose(values, row[list(ids)], atol=1e-3, rtol=0)
