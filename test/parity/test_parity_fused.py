# SPDX-License-Identifier: Apache-2.0
"""Fused decoding against transformers: log-probabilities of whole answers, in half precision.

Without a GPU the kernels are their double in NumPy.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

pytestmark = [
    pytest.mark.parity,
    pytest.mark.only_on("cpu", "cuda", reason="TensorRT has no fused decoding"),
]
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams  # noqa: E402
from fixtures import on_device  # noqa: E402
from fixtures.fused_decoding import export_decoder, fused_on_host  # noqa: E402

TOKENS = 40  # with the prompt more than the windows
TOLERANCE = 2e-2  # of log-probabilities: rounding to fp16 between the layers
PROMPTS = ("What do you see?", "go to the red box behind the table and wait there", "turn left at once")
CASES = {
    "qwen2": {"num_key_value_heads": 1},  # biases of queries, keys and values, windows
    "qwen3": {"head_dim": 128, "tie_word_embeddings": False},  # norms of heads, windows
    "llama": {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2},  # biases, scaled RoPE
    "mistral": {"hidden_size": 192, "tie_word_embeddings": False},  # a window in every layer
}


@pytest.mark.parametrize("model_type", CASES)
def test_log_probabilities_of_answers_match(tmp_path, runtime_device, model_type):
    changes = {**CASES[model_type], "num_hidden_layers": 3}
    engine = export_decoder(tmp_path, model_type, changes)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype=torch.float32)
    model = model.half().float().eval()  # weights as the engine has them
    requests = [
        LLMGenerationRequest(
            prompt, sampling=SamplingParams(max_tokens=TOKENS, repetition_penalty=1.2), logprobs=3
        )
        for prompt in PROMPTS
    ]
    on_host = fused_on_host() if on_device.chosen == "cpu" else nullcontext()
    with on_host, LLMInferenceRuntime(engine, runtime_device, decode="fused") as runtime:
        assert runtime.fused_rows >= len(PROMPTS)
        answers = [*runtime.handle_request(requests), runtime.handle_request(requests[0])]
        prompts = [runtime.pipeline.preparer.prepare([request], 0)[0].token_ids for request in requests]
    for answer, prompt in zip(answers, [*prompts, prompts[0]], strict=True):
        ids = torch.tensor([prompt + answer.token_ids])
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1]
        assert len(answer.token_ids) > 5
        for entries, row in zip(answer.logprobs, logits.double().log_softmax(-1), strict=True):
            chosen, values = zip(*entries, strict=True)
            np.testing.assert_allclose(values, row[list(chosen)], atol=TOLERANCE, rtol=0)
