# SPDX-License-Identifier: Apache-2.0
"""Fused decoding against transformers: log-probabilities of whole answers, in half precision.

Answers of decode steps, and of verifications of drafted chains.

Without a GPU the kernels are their double in NumPy, and the CUDA sources compiled for the host.
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

from edgellm_ros.runtime.decoding.speculative.drafting_config import (  # noqa: E402
    SpecDecodeDraftingConfig,
)
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams  # noqa: E402
from fixtures import on_device  # noqa: E402
from fixtures.fused_decoding import compiled_for_host, export_decoder, fused_on_host  # noqa: E402

CHAIN = SpecDecodeDraftingConfig(1, 3, 4, "lookup", falls_back=False)
TOKENS = 40  # with the prompt more than the windows
TOLERANCE = 2e-2  # of log-probabilities: rounding to fp16 between the layers
PROMPTS = ("What do you see?", "go to the red box behind the table and wait there", "turn left at once")
CASES = {
    "qwen2": {"num_key_value_heads": 1},  # biases of queries, keys and values, windows
    "qwen3": {"head_dim": 128, "tie_word_embeddings": False},  # norms of heads, windows
    "llama": {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2},  # biases, scaled RoPE
    "mistral": {"hidden_size": 192, "tie_word_embeddings": False},  # a window in every layer
}


def ask(prompt: str, max_tokens: int) -> LLMGenerationRequest:
    return LLMGenerationRequest(
        prompt, sampling=SamplingParams(max_tokens=max_tokens, repetition_penalty=1.2), logprobs=3
    )


@pytest.mark.parametrize("model_type", CASES)
def test_log_probabilities_of_answers_match(tmp_path, runtime_device, model_type):
    engine, model = engine_and_reference(tmp_path, model_type)
    requests = [ask(prompt, TOKENS) for prompt in PROMPTS]
    on_host = fused_on_host() if on_device.chosen == "cpu" else nullcontext()
    with on_host, LLMInferenceRuntime(engine, runtime_device, decode="fused") as runtime:
        assert runtime.fused_rows >= len(PROMPTS)
        check(runtime, model, requests, [*runtime.handle_request(requests)])
        check(runtime, model, requests[:1], [runtime.handle_request(requests[0])])
    on_host = fused_on_host() if on_device.chosen == "cpu" else nullcontext()
    with on_host, LLMInferenceRuntime(engine, runtime_device, decode="fused", drafting=CHAIN) as runtime:
        assert runtime.pipeline.runner.most_verified_rows >= len(PROMPTS) * CHAIN.tree_size
        check(runtime, model, requests, [*runtime.handle_request(requests)])


@pytest.mark.only_on("cpu", reason="compiles the kernels for the host")
@pytest.mark.parametrize(
    ("model_type", "drafting"),
    [*((model_type, None) for model_type in CASES), ("qwen2", CHAIN), ("qwen3", CHAIN)],
)
def test_log_probabilities_of_the_compiled_kernels_match(tmp_path, model_type, drafting):
    engine, model = engine_and_reference(tmp_path, model_type, max_batch_size=1)
    (tmp_path / "kernels").mkdir()
    requests = [ask(PROMPTS[1], 16)]
    on_host = fused_on_host(compiled_for_host(tmp_path / "kernels"))
    with on_host, LLMInferenceRuntime(engine, "cpu", decode="fused", drafting=drafting) as runtime:
        check(runtime, model, requests, runtime.handle_request(requests))


def engine_and_reference(folder, model_type, **options):
    """Export a checkpoint; return the engine and transformers' model with the engine's weights."""
    engine = export_decoder(folder, model_type, {**CASES[model_type], "num_hidden_layers": 3}, **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "checkpoint", dtype=torch.float32)
    return engine, model.half().float().eval()


def check(runtime, model, requests, answers) -> None:
    """Compare the log-probabilities of answers with those that the model gives to the same tokens."""
    for request, answer in zip(requests, answers, strict=True):
        prompt = runtime.pipeline.preparer.prepare([request], 0)[0].token_ids
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1]
        assert len(answer.token_ids) > 5
        for entries, row in zip(answer.logprobs, logits.double().log_softmax(-1), strict=True):
            chosen, values = zip(*entries, strict=True)
            np.testing.assert_allclose(values, row[list(chosen)], atol=TOLERANCE, rtol=1e-3)
