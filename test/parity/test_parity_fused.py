# SPDX-License-Identifier: Apache-2.0
"""Fused decoding against transformers: every dense family, in half precision.

Log-probabilities of whole answers and greedy tokens, of decode steps and of verifications of drafted chains.
Without a GPU the kernels are the CUDA sources compiled for the host, and in tests marked kernel_doubles their
doubles in NumPy.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = [
    pytest.mark.parity,
    pytest.mark.only_on("cpu", "cuda", reason="TensorRT has no fused decoding"),
]
pytest.importorskip("torch")
pytest.importorskip("transformers")

from fused_families import FAMILIES, Family, load_half, logits_after  # noqa: E402

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.runtime.decoding.speculative.drafting_config import (  # noqa: E402
    SpecDecodeDraftingConfig,
)
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from edgellm_ros.runtime.request import SamplingParams  # noqa: E402
from fixtures import on_device  # noqa: E402
from fixtures.fused_decoding import compiled_for_host, fused_on_host  # noqa: E402

CHAIN = SpecDecodeDraftingConfig(1, 3, 4, "lookup", falls_back=False)
TOKENS = {False: 40, True: 12}  # without images: with the prompt more than the windows
# Of log-probabilities, in shares of the logits' standard deviation. The weights are the same; a hidden state
# that is rounded to fp16 is off by up to 2^-11 = 5e-4. Measured on a CPU: 1.4e-3.
TOLERANCE = 1e-2
PROMPTS = {  # and penalties of repeated tokens
    "What do you see?": 1.0,
    "go to the red box behind the table and wait there": 1.2,
    "turn left at once": 1.2,
}
CHAINED = ("qwen2", "qwen3", "qwen3_5", "nemotron_h")  # whose kernels for chains are compiled too
PROMPT = "go to the red box and wait there"


@dataclass(frozen=True)
class Case:
    name: str
    family: Family
    checkpoint: Path
    engine: Path
    model: Any  # transformers'


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory) -> Case:
    family, folder = FAMILIES[request.param], tmp_path_factory.mktemp(request.param)
    family.write(folder / "checkpoint")
    export(folder / "checkpoint", folder / "engine", precision="fp16")
    model = load_half(family, folder / "checkpoint")
    return Case(request.param, family, folder / "checkpoint", folder / "engine", model)


@pytest.fixture(scope="module")
def kernels():
    """The CUDA sources, compiled for the host once for all families that share them."""
    return compiled_for_host()


def ask(case: Case, prompt: str, max_tokens: int, repetition_penalty: float = 1.0):
    sampling = SamplingParams(max_tokens=max_tokens, repetition_penalty=repetition_penalty)
    return case.family.request(prompt, sampling=sampling, logprobs=3)


def answer(case: Case, device: Any, decoder: Any, requests: list, drafting: Any = None) -> None:
    """Answer with the fused kernels, and check."""
    on_host = fused_on_host(*decoder) if on_device.chosen == "cpu" else nullcontext()
    with on_host, LLMInferenceRuntime(case.engine, device, decode="fused", drafting=drafting) as runtime:
        nodes = drafting.tree_size if drafting else 1
        runner = runtime.pipeline.runner
        rows = runner.most_verified_rows if drafting else runtime.fused_rows
        assert rows >= len(requests) * nodes
        answers = runtime.handle_request(requests)
        for asked, found in zip(requests, answers, strict=True):
            check(case, runtime.pipeline.prepare([asked], 0)[0].token_ids, asked, found)


def check(case: Case, prompt: list[int], asked: Any, found: Any) -> None:
    """Compare with the logits that transformers gives to the same tokens."""
    logits = logits_after(case.family, case.checkpoint, case.model, prompt, found.token_ids)
    assert len(found.token_ids) > 5
    tolerance = TOLERANCE * float(logits.std())
    assert tolerance > 0
    for token, entries, row in zip(found.token_ids, found.logprobs, logits.log_softmax(-1), strict=True):
        chosen, values = zip(*entries, strict=True)
        np.testing.assert_allclose(values, row[list(chosen)], atol=tolerance, rtol=0)
        if asked.sampling.repetition_penalty == 1:
            assert row[token] >= row.max() - 2 * tolerance  # the greatest, or as good as that


@pytest.mark.kernel_doubles
def test_greedy_tokens_and_log_probabilities_match(case, runtime_device):
    tokens = TOKENS[case.family.sees]
    requests = [ask(case, prompt, tokens, penalty) for prompt, penalty in PROMPTS.items()]
    answer(case, runtime_device, (), requests)
    answer(case, runtime_device, (), requests[1:2])
    answer(case, runtime_device, (), requests, CHAIN)


@pytest.mark.only_on("cpu", reason="compiles the kernels for the host")
def test_the_compiled_kernels_match(case, kernels):
    requests = [ask(case, PROMPT, 12)]
    answer(case, "cpu", (kernels,), requests)
    if case.name in CHAINED:
        answer(case, "cpu", (kernels,), requests, CHAIN)
