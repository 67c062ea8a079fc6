# SPDX-License-Identifier: Apache-2.0
"""The runtime on the graphs of hybrids for CUDA: here the CPU loads them."""

from __future__ import annotations

import shutil

import pytest

from doubles.scripted_drafter import draft_by_script
from edgellm_ros.builder import export
from edgellm_ros.runtime.decoding.speculative.drafting_config import SpecDecodeDraftingConfig
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams
from fixtures.cuda_graphs import use_on_cpu
from fixtures.exported_graphs import knows_lengths
from fixtures.hybrid_checkpoints import write_nemotron_h_checkpoint, write_qwen3_5_checkpoint
from fixtures.requests_for_tests import assert_same_with_drafting

pytestmark = [
    pytest.mark.slow,
    pytest.mark.only_on("cpu", reason="a CUDA device takes the variant anyway"),
    knows_lengths,
]
WRITERS = {"nemotron_h": write_nemotron_h_checkpoint, "qwen3_5": write_qwen3_5_checkpoint}
SYSTEM = "turn left at the red box "
LIMITS = {"go": 12, "go to the red box and then turn left at the door " * 2: 3, "turn": 12, "to the door": 5}
REQUESTS = [
    LLMGenerationRequest(text, system_prompt=SYSTEM, sampling=SamplingParams(max_tokens=limit))
    for text, limit in LIMITS.items()
]


@pytest.fixture(scope="module", params=WRITERS)
def engines(request, tmp_path_factory):
    """Two engine directories of one model; in the second the CPU loads the CUDA graph."""
    root = tmp_path_factory.mktemp(request.param)
    export(WRITERS[request.param](root / "checkpoint"), root / "mask")
    shutil.copytree(root / "mask", root / "lengths")
    use_on_cpu(root / "lengths", "llm/model", "llm/verify")
    return root / "mask", root / "lengths"


def test_both_graphs_answer_alike_alone_in_batches_and_with_a_saved_prompt(engines):
    answers = []
    for engine in engines:
        with LLMInferenceRuntime(engine, "cpu") as runtime:
            bindings = runtime.pipeline.runner._decode.executor.bindings
            assert ("attention_mask" in bindings) == (engine.name == "mask")
            found = [*map(runtime.handle_request, REQUESTS), *runtime.handle_request(REQUESTS)]
            runtime.gen_and_save_system_prompt_kv_cache(SYSTEM)
            found += runtime.handle_request(REQUESTS)
            answers.append([(response.token_ids, response.reused_tokens) for response in found])
    assert answers[0] == answers[1]
    assert any(reused for _, reused in answers[0])


@pytest.mark.parametrize("steps", [1, 4, 7])
def test_the_graph_for_cuda_verifies_chains_of_a_batch_one_after_another(engines, steps):
    mask, lengths = engines
    config = SpecDecodeDraftingConfig(1, steps, steps + 1, "lookup", falls_back=False)
    with LLMInferenceRuntime(mask, "cpu", prefix_cache_bytes=0) as runtime:
        expected = runtime.handle_request(REQUESTS)
    known = {one.prompt: answer.token_ids for one, answer in zip(REQUESTS, expected, strict=True)}
    with LLMInferenceRuntime(lengths, "cpu", prefix_cache_bytes=0, drafting=config) as runtime:
        assert "attention_mask" not in runtime.pipeline.runner._decode.executor.bindings
        draft_by_script(runtime, steps, steps + 1).answers = lambda one: known[one.prompt]
        for answer, other in zip(runtime.handle_request(REQUESTS), expected, strict=True):
            assert_same_with_drafting(answer, other)
        assert runtime.spec_decode_generation_metrics.tokens_per_verification > 1.2
