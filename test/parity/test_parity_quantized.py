# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints against transformers' model of their dequantised weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from engine_graphs import Graph, LanguageModel  # noqa: E402
from quantized_checkpoints import CASES, write_checkpoint  # noqa: E402
from text_families import reference_logits, rope_rows  # noqa: E402

from edgellm_ros.builder import export  # noqa: E402
from edgellm_ros.engine_directory.config import EngineConfig  # noqa: E402

TOLERANCE = 1e-3
LIMITS = {"max_input_len": 32, "max_kv_cache_capacity": 48}
STOPS = (10, 11, 20)  # a prompt, a decode step, and tokens that follow cached ones


@dataclass(frozen=True)
class Exported:
    name: str
    engine: Path
    config: EngineConfig
    ids: list[int]
    expected: np.ndarray  # logits at every position


@pytest.fixture(scope="module", params=CASES)
def exported(request, tmp_path_factory) -> Exported:
    folder = tmp_path_factory.mktemp(request.param)
    model = write_checkpoint(folder / "checkpoint", CASES[request.param])
    config = export(folder / "checkpoint", folder / "engine", **LIMITS)
    ids = np.random.default_rng(0).integers(0, config.llm.vocab_size, STOPS[-1]).tolist()
    return Exported(request.param, folder / "engine", config, ids, reference_logits(model, ids))


def test_logits_equal_those_of_the_dequantised_weights(exported):
    model, found, start = LanguageModel(exported.engine), [], 0
    for stop in STOPS:
        rows = rope_rows(exported.config, start, stop)
        embeds = model.embedding[exported.ids[start:stop]]
        found.append(model.step(embeds, *rows, wanted=range(stop - start)))
        start = stop
    assert np.abs(exported.expected).max() > 0.5
    np.testing.assert_allclose(np.concatenate(found), exported.expected, atol=TOLERANCE, rtol=0)


def test_the_graph_for_cuda_gives_the_same_logits(exported):
    graph = Graph(exported.engine / "llm" / "model.cuda.onnx")
    embedding = LanguageModel(exported.engine).embedding
    cos, sin = rope_rows(exported.config, 0, LIMITS["max_kv_cache_capacity"])
    inputs: dict[str, Any] = {
        "inputs_embeds": embedding[exported.ids][None],
        "rope_cos": cos[0],
        "rope_sin": sin[0],
        "position_ids": np.arange(STOPS[-1])[None],
        "kv_length": [STOPS[-1]],
        "kv_write_index": [0],
        "last_token_ids": np.arange(STOPS[-1])[None],
    }
    caches = {
        name: np.zeros([1, *node.shape[1:]]) for name, node in graph.inputs.items() if "_cache_" in name
    }
    found = graph(**inputs, **caches)["logits"][0]
    np.testing.assert_allclose(found, exported.expected, atol=TOLERANCE, rtol=0)


def test_no_weight_is_expanded_when_onnx_runtime_loads_the_graph(exported, tmp_path):
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    onnxruntime.InferenceSession(
        str(exported.engine / "llm" / "model.onnx"), options, providers=["CPUExecutionProvider"]
    )
    graph = onnx.load(tmp_path / "optimised.onnx", load_external_data=False).graph
    floats = [each for each in graph.initializer if each.data_type == onnx.TensorProto.FLOAT]
    matrices = {tuple(each.dims) for each in floats if len(each.dims) == 2 and min(each.dims) >= 64}
    kept = {(128, 256)} if exported.name == "modelopt-fp8" else set()  # gate_proj
    head = (128, exported.config.llm.vocab_size)
    assert matrices <= {head, *kept}
    joined = sum(node.op_type == "MatMulNBits" for node in graph.node)
    apart = sum(node.op_type == "DequantizeLinear" for node in graph.node)
    four_bits = exported.name.startswith(("awq", "gptq-4", "packed-4"))
    assert (joined, apart) == ((4, 0) if four_bits else (0, 4))
