# SPDX-License-Identifier: Apache-2.0
"""The runtime on the graphs of hybrids for CUDA: here the CPU loads them."""

from __future__ import annotations

import shutil

import pytest

from edgellm_ros.builder import export
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest, SamplingParams
from fixtures.cuda_graphs import use_on_cpu
from fixtures.exported_graphs import knows_lengths
from fixtures.hybrid_checkpoints import write_nemotron_h_checkpoint, write_qwen3_5_checkpoint

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
    use_on_cpu(root / "lengths", "llm/model")
    return root / "mask", root / "lengths"


def test_both_graphs_answer_alike_alone_in_batches_and_with_a_saved_prompt(engines):
    answers = []
    for engine in engines:
        with LLMInferenceRuntime(engine, "cpu") as runtime:
            assert ("attention_mask" in runtime.pipeline.runner._decode.bindings) == (engine.name == "mask")
            found = [*map(runtime.handle_request, REQUESTS), *runtime.handle_request(REQUESTS)]
            runtime.gen_and_save_system_prompt_kv_cache(SYSTEM)
            found += runtime.handle_request(REQUESTS)
            answers.append([(response.token_ids, response.reused_tokens) for response in found])
    assert answers[0] == answers[1]
    assert any(reused for _, reused in answers[0])
