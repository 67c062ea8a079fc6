# SPDX-License-Identifier: Apache-2.0
"""Hybrid models of random sizes against transformers.

There are prompts of all lengths, batches and prefixes.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from engine_graphs import LanguageModel  # noqa: E402
from greedy_answers import greedy_logits  # noqa: E402

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.builder.lowering.standard.recurrent import CHUNK  # noqa: E402
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime  # noqa: E402
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams  # noqa: E402
from fixtures.hybrid_checkpoints import write_nemotron_h_checkpoint, write_qwen3_5_checkpoint  # noqa: E402

TOLERANCE = 1e-3
LENGTHS = (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK)
WRITERS = {"nemotron_h": write_nemotron_h_checkpoint, "qwen3_5": write_qwen3_5_checkpoint}
CASES = [(family, seed) for family in WRITERS for seed in range(8)]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def model(request, tmp_path_factory):
    family, seed = request.param
    folder = tmp_path_factory.mktemp(family)
    checkpoint = WRITERS[family](folder / "checkpoint", seed)
    export(checkpoint, folder / "engine")
    reference = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    return folder / "engine", reference


def rope_rows(reference, count: int) -> list[np.ndarray]:
    """Return cos and sin [1,S,R/2] of a text by the reference's own code.

    Without RoPE, return an empty list.
    """
    if not hasattr(reference.model, "rotary_emb"):
        return []
    with torch.no_grad():
        rows = reference.model.rotary_emb(torch.zeros(1), torch.arange(count)[None])
    return [half[..., : half.shape[-1] // 2].numpy() for half in rows]


def test_logits_of_every_token_match_for_prompts_of_all_lengths(model):
    engine, reference = model
    graph = LanguageModel(engine)
    for count in LENGTHS:
        ids = np.random.default_rng(count).integers(0, len(graph.embedding), count)
        with torch.no_grad():
            expected = reference(torch.from_numpy(ids)[None]).logits[0].numpy()
        assert np.abs(expected).max() > 0.5
        graph.reset()
        found = graph.step(graph.embedding[ids], *rope_rows(reference, count), wanted=range(count))
        np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)


TEXTS = ("go", "go to the red box and turn left at the door " * 4, "turn", "to the door " * 12)
LIMITS = (32, 5, 32, 9)  # the second and the fourth leave the batch in the middle


def requests() -> list[LLMGenerationRequest]:
    return [
        LLMGenerationRequest(text, sampling=SamplingParams(max_tokens=limit))
        for text, limit in zip(TEXTS, LIMITS, strict=True)
    ]


@pytest.fixture(scope="module")
def runtimes(model, runtime_device):
    """A runtime without prefix cache (0), and one with a prefix cache (None)."""
    with (
        LLMInferenceRuntime(model[0], runtime_device, prefix_cache_bytes=0) as without,
        LLMInferenceRuntime(model[0], runtime_device) as caching,
    ):
        yield {0: without, None: caching}


@pytest.mark.parametrize("prefix_cache_bytes", [0, None])
def test_a_batch_gives_the_greedy_tokens_of_transformers(model, runtimes, prefix_cache_bytes):
    _, reference = model
    runtime = runtimes[prefix_cache_bytes]
    found = runtime.handle_request(requests())
    prompts = runtime.base_model_input_token_ids
    stops = runtime.pipeline.config.stop_token_ids
    for response, prompt, limit in zip(found, prompts, LIMITS, strict=True):
        greedy_logits(reference, prompt, response.token_ids, limit, stops)


def test_a_batch_with_a_reused_system_prompt_gives_the_same_tokens(runtimes):
    system = "turn left at the red box " * 3
    batch = [dataclasses.replace(request, system_prompt=system) for request in requests()]
    expected = runtimes[0].handle_request(batch)
    tokens = runtimes[None].gen_and_save_system_prompt_kv_cache(system)
    found = runtimes[None].handle_request(batch)
    assert [response.reused_tokens for response in found] == [tokens] * len(batch)
    assert [response.token_ids for response in found] == [response.token_ids for response in expected]


@pytest.mark.parametrize("family", WRITERS)
@pytest.mark.parametrize("seed", [0, 3])
def test_hidden_states_of_every_layer_match(tmp_path, runtime_device, family, seed):
    checkpoint = WRITERS[family](tmp_path / "checkpoint", seed)
    reference = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    layers = reference.config.num_hidden_layers
    export(checkpoint, tmp_path / "engine", hidden_state_layers=range(1, layers + 1))
    with LLMInferenceRuntime(tmp_path / "engine", runtime_device) as runtime:
        runtime.handle_request(requests(), output_thinker_embeddings=True)
        prompts = runtime.base_model_input_token_ids
        device = runtime.pipeline.device
        found = [device.download(runtime.base_model_hidden_states(layer)) for layer in range(layers + 1)]
    for row, prompt in enumerate(prompts):
        with torch.no_grad():
            expected = reference(torch.tensor([prompt]), output_hidden_states=True).hidden_states
        assert len(expected) == layers + 1
        for states, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(states[row, : len(prompt)], wanted[0], atol=TOLERANCE, rtol=0)
