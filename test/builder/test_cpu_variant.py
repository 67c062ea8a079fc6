# SPDX-License-Identifier: Apache-2.0
"""The LLM graph for a CPU of engines with quantised weights.

The graph has ONNX Runtime's GroupQueryAttention.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from edgellm_ros.builder import export
from edgellm_ros.cli.quantization.cost import logits
from edgellm_ros.cli.quantization.token_runs import text_inputs
from edgellm_ros.engine.device import CpuDevice
from edgellm_ros.engine_directory.config import EngineConfig
from fixtures.cuda_graphs import compute, variant_inputs
from fixtures.decoder_checkpoint import write_decoder_checkpoint
from fixtures.exported_graphs import CAPACITY, knows_lengths
from fixtures.gguf_files import write_gguf

pytestmark = [pytest.mark.only_on("cpu", reason="a graph for a CPU"), knows_lengths]
LIMITS = {"max_input_len": 256, "max_kv_cache_capacity": CAPACITY}


def write_model(folder: Path, name: str) -> Path:
    """Write a GGUF file, or a checkpoint that the export rounds."""
    if name in ("Q4_1", "Q8_0"):
        return write_gguf(folder / "model.gguf", "llama", name)
    if name == "norms of heads":
        return write_gguf(folder / "model.gguf", "qwen3", "Q4_1")
    return write_decoder_checkpoint(folder / "windows", "mistral")


@pytest.fixture(scope="module", params=["Q4_1", "Q8_0", "norms of heads", "windows"])
def engine(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    rounds = {"quantize": "int8"} if request.param == "windows" else {}
    export(write_model(folder, request.param), folder / "engine", **rounds, **LIMITS)
    return folder / "engine"


@pytest.fixture(scope="module")
def masked(engine):
    """The same engine without its graph for a CPU."""
    ignore = shutil.ignore_patterns("model.cpu.onnx")
    return Path(shutil.copytree(engine, engine.parent / "masked", ignore=ignore))


def operators(engine: Path) -> set[str]:
    graph = onnx.load(engine / "llm/model.cpu.onnx", load_external_data=False).graph
    return {node.op_type for node in graph.node}


def llm_inputs(config: EngineConfig, batch: int, tokens: int, start: int) -> dict[str, np.ndarray]:
    """Make inputs of the graph with a mask: random rows behind random caches."""
    llm, rng = config.llm, np.random.default_rng(0)

    def random(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    lengths = start + np.arange(batch)  # sequences of different lengths
    seen = lengths[:, None] + np.arange(tokens)
    angles = random(batch, tokens, llm.head_dim // 2)
    inputs = {
        "inputs_embeds": random(batch, tokens, llm.hidden_size),
        "rope_cos": np.cos(angles),
        "rope_sin": np.sin(angles),
        "kv_write_index": lengths,
        "attention_mask": (np.arange(CAPACITY) <= seen[:, :, None])[:, None],
        "last_token_ids": np.full((batch, 1), tokens - 1),
    }
    for i in range(llm.num_hidden_layers):
        for part in ("key", "value"):
            inputs[f"{part}_cache_{i}"] = random(batch, llm.num_key_value_heads, CAPACITY, llm.head_dim)
    return inputs


@pytest.mark.parametrize(
    ("batch", "tokens", "start"), [(1, 9, 0), (1, 7, 12), (1, 1, 0), (4, 1, 300), (1, 90, 40)]
)
def test_it_computes_what_the_graph_with_a_mask_computes(engine, masked, batch, tokens, start):
    inputs = llm_inputs(EngineConfig.load(engine), batch, tokens, start)
    expected = compute(masked / "llm/model.onnx", CpuDevice(), inputs)
    found = compute(engine / "llm/model.cpu.onnx", CpuDevice(), variant_inputs(inputs, engine))
    assert "GroupQueryAttention" in operators(engine)
    for output, values in expected.items():
        np.testing.assert_allclose(found[output], values, atol=2e-5 * np.abs(values).max(), err_msg=output)


def test_rows_beyond_a_sequence_do_not_count(engine):
    inputs = llm_inputs(EngineConfig.load(engine), 2, 1, 70)
    path, found = engine / "llm/model.cpu.onnx", []
    for stale in (0, np.nan):
        caches = {name: rows.copy() for name, rows in inputs.items() if "cache" in name}
        for rows in caches.values():
            rows[:, :, 71:] = stale
        found.append(compute(path, CpuDevice(), variant_inputs({**inputs, **caches}, engine))["logits"])
    np.testing.assert_array_equal(*found)


def test_several_prompts_run_together(engine, masked):
    inputs = llm_inputs(EngineConfig.load(engine), 3, 9, 0)
    inputs["kv_write_index"][:] = 0
    inputs["attention_mask"] = np.broadcast_to(inputs["attention_mask"][:1], (3, 1, 9, CAPACITY)).copy()
    for name in ("rope_cos", "rope_sin"):  # all begin at position 0
        inputs[name][:] = inputs[name][:1]
    expected = compute(masked / "llm/model.onnx", CpuDevice(), inputs)["logits"]
    found = compute(engine / "llm/model.cpu.onnx", CpuDevice(), variant_inputs(inputs, engine))["logits"]
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


def test_offsets_of_blocks_and_their_product_are_one_node(tmp_path):
    export(write_gguf(tmp_path / "model.gguf", "llama", "Q4_1"), tmp_path, **LIMITS)
    graph = onnx.load(tmp_path / "llm/model.cpu.onnx", load_external_data=False).graph
    found = sorted(
        node.op_type for node in graph.node if node.name.startswith("/layers.0/attn/o_proj/offsets")
    )
    assert found == ["Gemm", "ReduceSum", "Reshape"]


def test_the_report_of_an_export_runs_it(engine, masked):
    tokens = [5, 1, 20, 7, 7, 3]
    inputs = llm_inputs(EngineConfig.load(engine), 1, len(tokens), 0) | text_inputs(engine, tokens)
    inputs["last_token_ids"] = np.arange(len(tokens))[None]
    expected = compute(masked / "llm/model.onnx", CpuDevice(), inputs)["logits"]
    np.testing.assert_allclose(logits(engine, [tokens]), expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("model", "changes", "options"),
    [
        ("llama", {}, {}),
        ("llama", {}, {"cpu_int8": True}),
        ("llama", {}, {"quantize": "int8", "kv_cache": "fp8"}),
        ("llama", {"hidden_size": 32}, {"quantize": "int8"}),  # heads of 8 values
    ],
    ids=["floats", "int8", "fp8 cache", "small heads"],
)
def test_other_engines_keep_the_graph_with_a_mask(tmp_path, model, changes, options):
    checkpoint = write_decoder_checkpoint(tmp_path / "checkpoint", model, **changes)
    export(checkpoint, tmp_path, **options, **LIMITS)
    assert "GroupQueryAttention" not in operators(tmp_path)
