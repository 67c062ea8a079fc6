# SPDX-License-Identifier: Apache-2.0
"""The runtime binds what a graph has as inputs: mask or lengths, embedding table."""

import json
import shutil

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file, save_file

from edgellm_ros.builder import export
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures.cuda_graphs import use_on_cpu
from fixtures.exported_graphs import knows_lengths
from fixtures.requests_for_tests import IMAGE, SOUND, request
from fixtures.tiny_adapter import write_adapter
from fixtures.tiny_checkpoint import write_json, write_tiny_checkpoint

pytestmark = [pytest.mark.only_on("cpu", reason="a CUDA device takes the variant anyway"), knows_lengths]
REQUESTS = [
    request(images=(IMAGE,), audio=(SOUND,), max_tokens=25, repetition_penalty=1.3, logprobs=2),
    request("what do you see?", max_tokens=9, repetition_penalty=1.3, logprobs=2),
    request("what do you see?", max_tokens=9, repetition_penalty=1.3, logprobs=2, lora="a"),
    request("x" * 250, max_tokens=40, repetition_penalty=1.3, logprobs=2),
]


@pytest.fixture(scope="module", params=["own head", "embedding table as head"])
def engines(request, tmp_path_factory):
    """Two engine directories of one model; in the second the CPU loads the CUDA graph."""
    root = tmp_path_factory.mktemp("variants")
    checkpoint = write_tiny_checkpoint(root / "checkpoint", shards=1)
    if request.param != "own head":
        tensors = load_file(checkpoint / "model.safetensors")
        del tensors["lm_head.weight"]
        save_file(tensors, checkpoint / "model.safetensors")
        config = json.loads((checkpoint / "config.json").read_text())
        write_json(checkpoint / "config.json", config | {"tie_word_embeddings": True})
    export(checkpoint, root / "mask", max_lora_rank=8)
    write_adapter(root / "mask" / "lora" / "a", checkpoint, seed=1, r=4)
    shutil.copytree(root / "mask", root / "lengths")
    llm = root / "lengths" / "llm"
    use_on_cpu(root / "lengths", "llm/model")
    graph = onnx.load(llm / "model.cpu.onnx", load_external_data=False).graph
    names = {value.name for value in graph.input}
    assert "attention_mask" not in names
    assert ("embedding" in names) == (request.param != "own head")
    return root / "mask", root / "lengths"


def test_an_engine_with_lengths_prefills_one_prompt_per_run(engines, monkeypatch):
    with LLMInferenceRuntime(engines[1], "cpu") as runtime:
        runs = []
        executor = runtime.pipeline.runner._prefill.executor
        prepare = executor.prepare
        monkeypatch.setattr(
            executor,
            "prepare",
            lambda profile, dims, *rest: runs.append(dims) or prepare(profile, dims, *rest),
        )
        runtime.handle_request([request(max_tokens=3, repetition_penalty=1.3)] * 3)
    assert [(dims["B"], dims["S"] > 1) for dims in runs] == [(1, True)] * 3 + [(3, False)] * 2


@pytest.mark.slow
def test_both_variants_give_the_same_answers(engines):
    answers = []
    for directory in engines:
        with LLMInferenceRuntime(directory, "cpu") as runtime:
            answers.append([*map(runtime.handle_request, REQUESTS), *runtime.handle_request(REQUESTS)])
    for one, other in zip(*answers, strict=True):
        assert one.token_ids == other.token_ids
        assert one.reused_tokens == other.reused_tokens
        values = [[value for step in answer.logprobs for _, value in step] for answer in (one, other)]
        np.testing.assert_allclose(*values, atol=1e-4)
