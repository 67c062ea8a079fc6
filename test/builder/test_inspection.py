# SPDX-License-Identifier: Apache-2.0
"""`inspect` reports the contents of an engine directory, and damaged files."""

from __future__ import annotations

import json
import shutil

import pytest

from edgellm_ros.builder import export, inspect, render
from edgellm_ros.engine_directory.schema import to_dict
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from fixtures.hybrid_checkpoints import write_nemotron_h_checkpoint


@pytest.fixture
def engine(tiny_engine, tmp_path):
    return shutil.copytree(tiny_engine, tmp_path / "engine")


def test_bindings_are_those_of_the_graphs(tiny_engine):
    report = inspect(tiny_engine)
    assert [part.name for part in report.parts] == ["llm", "visual", "audio", "action"]
    llm = report.parts[0]
    shapes = {binding.name: (binding.dtype, binding.shape) for binding in (*llm.inputs, *llm.outputs)}
    assert shapes["inputs_embeds"] == ("float", ("B", "S", 48))
    assert shapes["attention_mask"] == ("bool", ("B", 1, "S", 448))
    assert shapes["present_key_2"] == ("float", ("B", 2, 448, 16))
    assert llm.opset == 24


def test_memory_follows_from_the_config(tiny_engine):
    report = inspect(tiny_engine)
    memory = report.memory
    assert memory.kv_cache_per_token == 2 * 3 * 2 * 16 * 4  # keys and values, layers, heads, head size, fp32
    assert memory.kv_cache == memory.kv_cache_per_token * 448 * 4
    assert memory.total == memory.weights + memory.embedding + memory.kv_cache + memory.prefix_cache
    data = sum((tiny_engine / part.name / "model.onnx.data").stat().st_size for part in report.parts)
    assert data <= memory.weights < 1.1 * data


def test_memory_does_not_count_parts_that_are_left_out(tiny_engine):
    whole, text_only = inspect(tiny_engine), inspect(tiny_engine, without=["action", "visual", "audio"])
    weights = {part.name: part.weight_bytes for part in whole.parts}
    assert text_only.memory.weights == weights["llm"]
    assert whole.memory.total - text_only.memory.total == sum(weights.values()) - weights["llm"]
    memory = render(text_only).partition("\n\nmemory")[2].partition("\n\n")[0]
    assert memory.startswith(" without visual, audio, action\n")
    assert "weights of llm" in memory
    assert "weights of visual" not in memory
    assert [part.name for part in text_only.parts] == [part.name for part in whole.parts]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_states_of_a_hybrid_take_as_much_memory_as_the_runtime_allocates(tmp_path, precision):
    checkpoint = write_nemotron_h_checkpoint(tmp_path / "checkpoint")
    export(checkpoint, tmp_path / "engine", precision=precision, max_batch_size=3)
    report = inspect(tmp_path / "engine")
    memory = report.memory
    with LLMInferenceRuntime(tmp_path / "engine") as runtime:
        state, pipeline = runtime.pipeline.runner.recurrent, runtime.pipeline
        assert memory.state_per_sequence == state.row_bytes
        assert memory.states == 2 * state.nbytes
        assert memory.prefix_cache == pipeline.runner.kv_cache.nbytes + state.nbytes
        assert pipeline.reuse.states.places == 3
    parts = memory.weights, memory.embedding, memory.kv_cache, memory.states, memory.prefix_cache
    assert memory.total == sum(parts)
    assert "recurrent state of a sequence" in render(report)
    assert "3 layers of mamba2, 4 heads of 32 x 16" in render(report)


def test_report_is_readable_and_serialisable(tiny_engine):
    report = inspect(tiny_engine, verify=True)
    text = render(report)
    for expected in (
        "qwen3_omni_moe_thinker, fp32",
        "KV cache",
        "key_cache_0..2",
        "2 layers of 24, sounds of less than 24.65 s",
        "velocity",
        "SHA-256 checked",
    ):
        assert expected in text
    assert json.loads(json.dumps(to_dict(report)))["verified"] is True


def test_the_variants_for_cpu_and_cuda_are_listed_with_their_graph(engine):
    report = inspect(engine)
    cuda = ("model.cuda.onnx",)
    assert [part.variants for part in report.parts] == [("model.cpu.onnx", *cuda), (), (), cuda]
    assert "\n  variant model.cpu.onnx\n  variant model.cuda.onnx\n" in render(report)


def test_altered_weights_are_found_when_verifying(engine):
    path = engine / "llm" / "model.onnx.data"
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)
    inspect(engine)
    with pytest.raises(ValueError, match=r"llm/model.onnx.data has another SHA-256"):
        inspect(engine, verify=True)


def test_truncated_weights_are_found_at_once(engine):
    path = engine / "action" / "model.onnx.data"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"action/model.onnx.data has \d+ bytes"):
        inspect(engine)
