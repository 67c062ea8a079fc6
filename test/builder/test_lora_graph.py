# SPDX-License-Identifier: Apache-2.0
"""Graphs with LoRA inputs.

Without an adapter they have the bits of the base model; with one they compute what merging it gives.
"""

from __future__ import annotations

import json
import shutil

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file, save_file

from edgellm_ros.builder import export, inspect, render
from edgellm_ros.engine.onnxruntime.session import open_session
from fixtures.exported_graphs import HIDDEN, LAYERS, OPERATORS, llm_inputs

INNER, QUERY, KEY = 80, 64, 32
MODULES = {  # fan in, fan out
    "self_attn.q_proj": (HIDDEN, QUERY),
    "self_attn.k_proj": (HIDDEN, KEY),
    "self_attn.v_proj": (HIDDEN, KEY),
    "self_attn.o_proj": (QUERY, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}
TARGETS = {f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in MODULES.items()}


# Layers that read the same x share one pair of inputs.
JOINED = {
    "self_attn.q_proj:64+k_proj:32+v_proj:32": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_proj:80+up_proj:80": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}


def matrices(rank, seed=0):
    """Return random A [K, rank] and B [rank, N] for every module.

    The product has the magnitude of the module's weights.
    """
    rng = np.random.default_rng(seed)
    weights = {}
    for module, (fan_in, fan_out) in TARGETS.items():
        a, b = rng.standard_normal((fan_in, rank)), rng.standard_normal((rank, fan_out))
        scaled = a * fan_in**-0.5, b * max(rank, 1) ** -0.5
        weights[module] = tuple(matrix.astype(np.float32) for matrix in scaled)
    return weights


def adapter(rank, seed=0):
    """Return the matrices as LoRA inputs: A side by side, B on the diagonal."""
    weights, inputs = matrices(rank, seed), {}
    for i in range(LAYERS):
        for name, modules in JOINED.items():
            pairs = [weights[f"model.layers.{i}.{module}"] for module in modules]
            b = np.zeros((len(pairs) * rank, sum(b.shape[1] for _, b in pairs)), np.float32)
            column = 0
            for j, (_, part) in enumerate(pairs):
                b[j * rank : (j + 1) * rank, column : column + part.shape[1]] = part
                column += part.shape[1]
            inputs[f"model.layers.{i}.{name}.lora_A.weight"] = np.concatenate([a for a, _ in pairs], axis=1)
            inputs[f"model.layers.{i}.{name}.lora_B.weight"] = b
    return inputs


@pytest.fixture(scope="module")
def session(tiny_lora_engine):
    return open_session(tiny_lora_engine / "llm" / "model.onnx")


def test_linear_layers_of_every_decoder_layer_have_lora_inputs(tiny_lora_engine):
    graph = onnx.load(tiny_lora_engine / "llm" / "model.onnx", load_external_data=False).graph
    found = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in graph.input
        if "lora" in value.name
    }
    expected = {}
    for i in range(LAYERS):
        for name, modules in JOINED.items():
            rank = "r" if len(modules) == 1 else f"{len(modules)}r"
            prefix = f"model.layers.{i}.{name}"
            expected[f"{prefix}.lora_A.weight"] = [MODULES[modules[0]][0], rank]
            expected[f"{prefix}.lora_B.weight"] = [rank, sum(MODULES[module][1] for module in modules)]
    assert found == expected
    assert {node.op_type for node in graph.node} <= OPERATORS
    assert "/layers.1/mlp/gate_up_proj/lora/Gemm_1" in {node.name for node in graph.node}
    onnx.checker.check_model(tiny_lora_engine / "llm" / "model.onnx", full_check=True)


def test_rank_0_in_the_exporter_leaves_the_graph_as_it_is(tiny_checkpoint, tiny_engine, tmp_path):
    export(tiny_checkpoint, tmp_path, max_lora_rank=0)
    path = "llm/model.onnx"
    assert (tmp_path / path).read_bytes() == (tiny_engine / path).read_bytes()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (3, 1), (2, 7)])
def test_without_an_adapter_it_has_the_bits_of_a_graph_without_lora_inputs(
    session, tiny_engine, rank, batch, tokens
):
    """No adapter is rank 0, or zeros of rank 1 for executors without empty tensors."""
    inputs = llm_inputs(batch, tokens, start=9)
    expected = open_session(tiny_engine / "llm" / "model.onnx").run(None, inputs)
    zeros = {name: np.zeros_like(array) for name, array in adapter(rank).items()}
    for found, wanted in zip(session.run(None, inputs | zeros), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 3, 8])
def test_an_adapter_equals_merging_it_into_the_weights(session, tiny_checkpoint, tmp_path, rank):
    weights = matrices(rank)
    checkpoint = shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    shards = json.loads((checkpoint / "model.safetensors.index.json").read_text())["weight_map"]
    for file in set(shards.values()):
        tensors = {name: array.astype(np.float32) for name, array in load_file(checkpoint / file).items()}
        for name in tensors.keys() & {f"{module}.weight" for module in TARGETS}:
            module = name.removesuffix(".weight")
            a, b = weights[module]
            tensors[name] += (a @ b).T
        save_file(tensors, checkpoint / file)
    export(checkpoint, tmp_path / "merged")
    inputs = llm_inputs(2, 6, start=4)
    expected = open_session(tmp_path / "merged" / "llm" / "model.onnx").run(["logits"], inputs)[0]
    found = session.run(["logits"], inputs | adapter(rank))[0]
    np.testing.assert_allclose(found, expected, atol=1e-4)
    plain = session.run(["logits"], inputs | adapter(0))[0]
    assert np.abs(found - plain).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("rank", [1, 8])
@pytest.mark.parametrize("tokens", [1, 7])
def test_a_sequence_with_an_adapter_has_the_same_bits_alone_padded_and_in_a_batch(
    tiny_checkpoint, tmp_path, precision, rank, tokens
):
    export(tiny_checkpoint, tmp_path, precision=precision, max_lora_rank=8)
    session = open_session(tmp_path / "llm" / "model.onnx")
    types = {value.name: np.float16 for value in session.get_inputs() if value.type == "tensor(float16)"}

    def run(inputs):
        arrays = inputs | adapter(rank)
        return session.run(
            None, {name: array.astype(types.get(name, array.dtype)) for name, array in arrays.items()}
        )

    batch = llm_inputs(3, tokens, start=12)
    together = run(batch)
    for b in range(3):
        alone = run({name: array[b : b + 1] for name, array in batch.items()})
        for found, expected in zip(alone, together, strict=True):
            np.testing.assert_array_equal(found[0], expected[b])
    if tokens > 1:
        padded = llm_inputs(3, tokens + 4, start=12, seed=1)
        for name, array in batch.items():
            if array.ndim == 3:
                padded[name][:, :tokens] = array
            elif name != "attention_mask":
                padded[name] = array
        np.testing.assert_array_equal(run(padded)[0], together[0])


def test_inspect_shows_the_inputs_once_for_all_layers(tiny_lora_engine):
    report = inspect(tiny_lora_engine)
    assert report.config.builder.max_lora_rank == 8
    assert "model.layers.0.mlp.down_proj.lora_A.weight" in {value.name for value in report.parts[0].inputs}
    rows = [" ".join(row.split()) for row in render(report).splitlines()]
    assert "in model.layers.0..2.mlp.down_proj.lora_A.weight float [80, r]" in rows
    assert "adapters up to rank 8; none here" in rows
