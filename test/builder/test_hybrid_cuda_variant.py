# SPDX-License-Identifier: Apache-2.0
"""The graphs of hybrids for ONNX Runtime's CUDA provider compute what the standard graphs compute."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file

from edgellm_ros.builder import export
from edgellm_ros.engine.device import CpuDevice
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine_directory.lora_inputs import rank_sizes
from fixtures.exported_graphs import knows_lengths
from fixtures.hybrid_checkpoints import write_nemotron_h_checkpoint, write_qwen3_5_checkpoint
from fixtures.on_device import put

WRITERS = {"nemotron_h": write_nemotron_h_checkpoint, "qwen3_5": write_qwen3_5_checkpoint}
CAPACITY, POSITIONS = 160, 200
OPTIONS = {"max_kv_cache_capacity": CAPACITY, "max_input_len": 150}
RUNS = [  # sequences, tokens of each, valid tokens, rows in the cache before
    pytest.param(1, 1, [1], 0, id="a first token"),
    pytest.param(3, 1, [1, 1, 1], 20, id="a decode step of a batch"),
    pytest.param(1, 2, [2], 7, id="two tokens"),
    pytest.param(1, 64, [64], 0, id="a chunk"),
    pytest.param(1, 130, [130], 9, id="chunks and a part of one"),
    pytest.param(1, 70, [65], 0, id="padding in a second chunk"),
    pytest.param(1, 6, [1], 3, id="padding longer than the convolution"),
]


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Function of family, seed and options of `export` that returns an engine directory, made once."""
    made: dict[str, Path] = {}

    def make(family: str, seed: int, changes=None, **options) -> Path:
        key = json.dumps([family, seed, changes, options])
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            checkpoint = WRITERS[family](folder / "checkpoint", seed, **(changes or {}))
            export(checkpoint, folder / "engine", **OPTIONS, **options)
            made[key] = folder / "engine"
        return made[key]

    return make


def make_inputs(engine: Path, batch: int, tokens: int, valid: list[int], start: int, rank: int = 0, seed=0):
    """Return random inputs of both graphs, by name: caches, states, adapters of this rank."""
    rng = np.random.default_rng(seed)
    mask_graph = EngineExecutor.open(engine / "llm" / "model.onnx", CpuDevice(), threads=1)
    starts = start + np.arange(batch)
    seen = starts[:, None] + np.arange(tokens)
    sizes = {"B": batch, "S": tokens, "N": 1, **rank_sizes(rank)}
    inputs = {}
    for name, binding in mask_graph.bindings.items():
        shape = [sizes.get(size, size) for size in binding.shape]
        if binding.is_input and binding.dtype.kind == "f":
            scale = 0.1 if "lora_" in name else 1.0
            inputs[name] = (rng.standard_normal(shape) * scale).astype(np.float32)
    if "rope_cos" in inputs:
        angle = rng.uniform(0, 6, inputs["rope_cos"].shape)
        inputs["rope_cos"], inputs["rope_sin"] = np.cos(angle), np.sin(angle)
    inputs |= {
        "kv_write_index": starts,
        "attention_mask": (np.arange(CAPACITY) <= seen[:, :, None])[:, None],
        "last_token_ids": np.array(valid)[:, None] - 1,
        "valid_tokens": np.array(valid),
    }
    return inputs


def as_variant(inputs, engine: Path):
    """Return the inputs of the standard graph as those of the variant."""
    batch, tokens, _ = inputs["inputs_embeds"].shape
    others = {name: array for name, array in inputs.items() if name != "attention_mask"}
    if "rope_cos" in inputs:
        others["position_ids"] = 3 + np.arange(batch * tokens).reshape(batch, tokens)
        for name in ("rope_cos", "rope_sin"):
            others[name] = np.zeros((POSITIONS, inputs[name].shape[2]), np.float32)
            others[name][others["position_ids"]] = inputs[name]
    others["kv_length"] = inputs["kv_write_index"] + tokens
    others["embedding"] = load_file(engine / "embedding.safetensors")["embedding"]
    return others


def run(path: Path, device, inputs):
    """Run a graph once; return its outputs. Caches are updated in place, states are not."""
    executor = EngineExecutor.open(path, device, threads=1)
    batch, tokens, _ = inputs["inputs_embeds"].shape
    dims = {"B": batch, "S": tokens, "N": 1, "P": POSITIONS}
    tensors = {}
    for name, binding in executor.bindings.items():
        if binding.is_input:
            tensors[name] = put(device, inputs[name].astype(binding.dtype))
            dims |= {
                symbol: size
                for symbol, size in zip(binding.shape, inputs[name].shape, strict=True)
                if isinstance(symbol, str)
            }
    for name, binding in executor.bindings.items():
        cache = name.replace("present_key_", "key_cache_").replace("present_value_", "value_cache_")
        if not binding.is_input:
            shape = tuple(dims.get(size, size) for size in binding.shape)
            tensors[name] = tensors[cache] if cache != name else device.empty(shape, binding.dtype)
    executor.prepare(0, dims, tensors, device.stream)
    executor.execute(device.stream)
    return {name: device.download(tensors[name]) for name, b in executor.bindings.items() if not b.is_input}


def assert_equal(engine: Path, device, inputs, tolerance: float) -> None:
    valid, start = inputs["valid_tokens"], inputs["kv_write_index"]
    expected = run(engine / "llm" / "model.onnx", CpuDevice(), inputs)
    found = run(engine / "llm" / "model.cuda.onnx", device, as_variant(inputs, engine))
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        for row, count in enumerate(valid):  # what padding computes is not read
            one, other = found[name][row].astype(np.float32), values[row].astype(np.float32)
            if name.startswith(("present_key", "present_value")):
                one, other = (x[:, : start[row] + count] for x in (one, other))
            if name.startswith("hidden_states"):
                one, other = one[:count], other[:count]
            scale = max(1.0, np.abs(other).max())
            np.testing.assert_allclose(one, other, atol=tolerance * scale, err_msg=name)


@knows_lengths
@pytest.mark.only_on("cpu", "cuda", reason="TensorRT uses the standard graph")
@pytest.mark.parametrize(("batch", "tokens", "valid", "start"), RUNS)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("family", WRITERS)
def test_the_variant_equals_the_standard_graph(device, exports, family, seed, batch, tokens, valid, start):
    engine = exports(family, seed)
    assert_equal(engine, device, make_inputs(engine, batch, tokens, valid, start), 3e-5)


@knows_lengths
@pytest.mark.only_on("cpu", "cuda", reason="TensorRT uses the standard graph")
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("family", WRITERS)
def test_the_variant_has_adapters_and_hidden_states(device, exports, family, tokens):
    engine = exports(family, 3, max_lora_rank=4, hidden_state_layers=[1, 2])
    inputs = make_inputs(engine, 1, tokens, [tokens], 4, rank=3)
    assert any("lora_A" in name for name in inputs)
    assert_equal(engine, device, inputs, 3e-5)


@knows_lengths
@pytest.mark.only_on("cpu", "cuda", reason="TensorRT uses the standard graph")
@pytest.mark.parametrize(("batch", "tokens"), [(1, 5), (2, 1)])
@pytest.mark.parametrize("family", WRITERS)
def test_the_variant_equals_the_standard_graph_in_half_precision(device, exports, family, batch, tokens):
    if family == "qwen3_5" and device.memory == "cpu":
        pytest.skip("ONNX Runtime's GroupQueryAttention norms queries and keys on CUDA only: --device cuda")
    engine = exports(family, 0, precision="fp16")
    assert_equal(engine, device, make_inputs(engine, batch, tokens, [tokens] * batch, 4), 2e-2)
