# SPDX-License-Identifier: Apache-2.0
"""Text families against transformers: eight random checkpoints of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from engine_graphs import Graph, LanguageModel  # noqa: E402
from text_families import (  # noqa: E402
    CASES,
    FAMILIES,
    LIMITS,
    MAX_TOKENS,
    PROMPTS,
    SETTINGS,
    choose,
    reference_logits,
    rope_rows,
    write_checkpoint,
)

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.engine_directory.config import EngineConfig  # noqa: E402
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from edgellm_ros.runtime.request import (  # noqa: E402
    LLMGenerationRequest,
    LLMGenerationResponse,
    SamplingParams,
)
from fixtures.on_device import assert_same_up_to_rounding  # noqa: E402

TOLERANCE = 1e-3
TOKENS = 120  # of a sequence of random tokens: more than most sliding windows


@dataclass(frozen=True)
class Case:
    family: str
    settings: dict[str, Any]
    checkpoint: Path
    engine: Path
    config: EngineConfig
    reference: Any  # transformers' model


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def case(request, tmp_path_factory) -> Case:
    family, index = request.param
    folder = tmp_path_factory.mktemp(family)
    checkpoint = write_checkpoint(folder / "checkpoint", family, index)
    config = export(checkpoint.directory, folder / "engine", **LIMITS)
    return Case(
        family,
        checkpoint.settings,
        checkpoint.directory,
        folder / "engine",
        config,
        checkpoint.reference(),
    )


@pytest.fixture(scope="module")
def runtime(case, runtime_device) -> Iterator[LLMInferenceRuntime]:
    with LLMInferenceRuntime(case.engine, runtime_device) as runtime:
        yield runtime


def ask(prompt: str) -> LLMGenerationRequest:
    return LLMGenerationRequest(prompt, sampling=SamplingParams(max_tokens=MAX_TOKENS), logprobs=5)


def reported(response: LLMGenerationResponse) -> np.ndarray:
    """Return the largest log-probability of each token."""
    return np.array([entries[0][1] for entries in response.logprobs])


def random_ids(case: Case) -> list[int]:
    return np.random.default_rng(0).integers(0, case.config.llm.vocab_size, TOKENS).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_checkpoints_have_every_value_of_every_setting(family):
    chosen = choose(family)
    for name, values in SETTINGS[family].items():
        for value in values:
            wanted = dict(zip(name, value, strict=True)) if isinstance(name, tuple) else {name: value}
            assert any(wanted.items() <= settings.items() for settings in chosen)


def test_logits_at_every_position_match(case):
    ids, model = random_ids(case), LanguageModel(case.engine)
    found, start = [], 0
    for stop in (70, 71, TOKENS):  # a prompt, a decode step, and tokens that follow cached ones
        rows = rope_rows(case.config, start, stop)
        found.append(model.step(model.embedding[ids[start:stop]], *rows, wanted=range(stop - start)))
        start = stop
    expected = reference_logits(case.reference, ids)
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(np.concatenate(found), expected, atol=TOLERANCE, rtol=0)


def test_the_graph_for_cuda_gives_the_same_logits(case):
    ids, graph = random_ids(case), Graph(case.engine / "llm" / "model.cuda.onnx")
    embedding = LanguageModel(case.engine).embedding
    caches = {
        name: np.zeros([1, *node.shape[1:]]) for name, node in graph.inputs.items() if "_cache_" in name
    }
    cos, sin = rope_rows(case.config, 0, LIMITS["max_kv_cache_capacity"])
    start, found = 0, []
    for stop in (70, 71, TOKENS):
        inputs = {
            "inputs_embeds": embedding[ids[start:stop]][None],
            "rope_cos": cos[0],
            "rope_sin": sin[0],
            "position_ids": np.arange(start, stop)[None],
            "kv_length": [stop],
            "kv_write_index": [start],
            "last_token_ids": np.arange(stop - start)[None],
            "embedding": embedding,
        }
        out = graph(**{name: value for name, value in inputs.items() if name in graph.inputs}, **caches)
        caches = {name: out["present_" + name.replace("_cache_", "_")] for name in caches}
        found.append(out["logits"][0])
        start = stop
    expected = reference_logits(case.reference, ids)
    np.testing.assert_allclose(np.concatenate(found), expected, atol=TOLERANCE, rtol=0)


def test_greedy_tokens_match(case, runtime):
    for prompt in PROMPTS[:2]:
        found = runtime.handle_request(ask(prompt)).token_ids
        ids = runtime.base_model_input_token_ids[0]
        expected = reference_logits(case.reference, ids + found)[len(ids) - 1 : -1].argmax(-1)
        assert len(found) == MAX_TOKENS
        assert found == expected.tolist()


def test_a_batch_of_different_requests_equals_each_alone(runtime):
    alone = [runtime.handle_request(ask(prompt)) for prompt in PROMPTS]
    together = runtime.handle_request([ask(prompt) for prompt in PROMPTS])
    for one, other in zip(alone, together, strict=True):
        assert other.token_ids == one.token_ids
        assert_same_up_to_rounding(reported(other), reported(one))
    assert len({response.logprobs[0][0] for response in alone}) == len(PROMPTS)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("index", [0, 5])
def test_an_adapter_of_peft_gives_the_same_tokens_and_log_probabilities(
    tmp_path, runtime_device, family, index
):
    peft = pytest.importorskip("peft")
    checkpoint = write_checkpoint(tmp_path / "checkpoint", family, index)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    model = peft.get_peft_model(checkpoint.reference(), config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # PEFT starts with zeros
            parameter.data.normal_(std=0.3, generator=generator)
    model.save_pretrained(checkpoint.directory / "lora" / "adapter")
    export(checkpoint.directory, tmp_path / "engine", **LIMITS)
    request = LLMGenerationRequest(
        PROMPTS[0], lora="adapter", sampling=SamplingParams(max_tokens=MAX_TOKENS), logprobs=5
    )
    with LLMInferenceRuntime(tmp_path / "engine", runtime_device) as runtime:
        response = runtime.handle_request(request)
        ids = runtime.base_model_input_token_ids[0]
    logits = torch.tensor(reference_logits(model.eval(), ids + response.token_ids)[len(ids) - 1 : -1])
    assert response.token_ids == logits.argmax(-1).tolist()
    base = reference_logits(checkpoint.reference(), ids)[-1]
    assert np.abs(logits[0].numpy() - base).max() > 0.1  # else it would say little
    for entries, row in zip(response.logprobs, logits.double().log_softmax(-1), strict=True):
        tokens, values = zip(*entries, strict=True)
        np.testing.assert_allclose(values, row[list(tokens)], atol=TOLERANCE, rtol=0)
