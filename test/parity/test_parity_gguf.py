# SPDX-License-Identifier: Apache-2.0
"""GGUF files against transformers, which dequantises them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from fixtures.gguf_files import ARCHITECTURES, QUANTISED, write_gguf  # noqa: E402
from fixtures.requests_for_tests import request  # noqa: E402

LIMITS = {"max_input_len": 256, "max_kv_cache_capacity": 512, "max_batch_size": 1}
KINDS = ("F32", "F16", *QUANTISED)
PROMPTS = ("in the other thing", "the inner tin", "{x: 1}\n\n  the")
TOKENS = 32


def load(path: Path):
    """Load a GGUF file with transformers."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()


@torch.no_grad()
def greedy(model, ids: list[int], count: int, stops: tuple[int, ...]) -> tuple[list[int], np.ndarray]:
    """Return greedy tokens, the stop token included, and their logits [n,V]."""
    out = model(torch.tensor([ids]), use_cache=True)
    tokens, logits = [], []
    while True:
        logits.append(out.logits[0, -1].numpy())
        tokens.append(int(logits[-1].argmax()))
        if len(tokens) == count or tokens[-1] in stops:
            return tokens, np.stack(logits)
        out = model(torch.tensor([[tokens[-1]]]), past_key_values=out.past_key_values, use_cache=True)


def assert_same(runtime, model, one, stops, tolerance: float) -> None:
    """Compare tokens and log-probabilities of an answer."""
    answer = runtime.handle_request(one)
    ids = runtime.base_model_input_token_ids[0]
    tokens, logits = greedy(model, ids, one.sampling.max_tokens, stops)
    assert answer.token_ids == tokens
    expected = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    expected = expected - logits.max(-1, keepdims=True)
    for row, found in zip(expected, answer.logprobs, strict=True):
        for token, value in found:
            assert value == pytest.approx(row[token], abs=tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_answers_of_random_models(tmp_path, architecture, kind):
    for seed in range(3):
        path = write_gguf(tmp_path / str(seed) / "model.gguf", architecture, kind, seed)
        config = export(path, tmp_path / str(seed) / "engine", **LIMITS)
        model = load(path)
        with LLMInferenceRuntime(tmp_path / str(seed) / "engine", prefix_cache_bytes=0) as runtime:
            for prompt in PROMPTS:
                one = request(prompt, max_tokens=TOKENS, logprobs=10)
                assert_same(runtime, model, one, config.stop_token_ids, 1e-3)


QUESTIONS = (
    "What is the capital of France?",
    "Write three facts about Mars.",
    "Write a Python function that adds two numbers.",
    "Translate to German: the robot drives to the door.",
    "List the numbers from 1 to 12, separated by commas.",
)


def test_a_published_model_answers_as_in_transformers(smollm2, tmp_path):
    """transformers gets our token ids, since it drops the pre-tokenizer."""
    config = export(smollm2, tmp_path / "engine", **LIMITS)
    model = load(smollm2)
    with LLMInferenceRuntime(tmp_path / "engine", prefix_cache_bytes=0) as runtime:
        for question in QUESTIONS:
            one = request(question, max_tokens=64, logprobs=5)
            assert_same(runtime, model, one, config.stop_token_ids, 5e-3)
