# SPDX-License-Identifier: Apache-2.0
"""Graphs keep the contract.

Graphs use only what ONNX Runtime and TensorRT's parser accept.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import onnx
import onnxruntime
import pytest

from edgellm_ros.engine.onnxruntime.session import open_session
from fixtures.exported_graphs import CAPACITY, HEAD_DIM, KV_HEADS, LAYERS, OPERATORS, llm_inputs

PARTS = ("llm", "visual", "audio", "action")


@pytest.fixture(scope="module")
def graphs(tiny_engine):
    return {
        part: onnx.load(tiny_engine / part / "model.onnx", load_external_data=False).graph for part in PARTS
    }


@pytest.fixture(scope="module")
def sessions(tiny_engine):
    return {part: open_session(tiny_engine / part / "model.onnx") for part in PARTS}


def action_inputs(samples, rows=30):
    """Return inputs of the action head with 20 filled rows of the cache.

    rows: how many of the cache are read.
    """
    rng = np.random.default_rng(0)
    angle = rng.standard_normal((1, 6, HEAD_DIM // 2)).astype(np.float32)
    caches = {
        f"{kind}_cache_{i}": rng.standard_normal((1, KV_HEADS, CAPACITY, HEAD_DIM)).astype(np.float32)
        for i in range(LAYERS)
        for kind in ("key", "value")
    }
    return {
        "trajectory": rng.standard_normal((samples, 6, 2)).astype(np.float32),
        "time": np.array([0.3], np.float32),
        "rope_cos": np.cos(angle),
        "rope_sin": np.sin(angle),
        "kv_length": np.array([20]),
        "cache_rows": np.arange(rows),
        **caches,
    }


@pytest.mark.parametrize("part", PARTS)
def test_operators_are_standard_and_known_to_tensorrt(graphs, part):
    assert {node.op_type for node in graphs[part].node} <= OPERATORS
    assert {node.domain for node in graphs[part].node} == {""}


@pytest.mark.parametrize(
    ("part", "layers", "inputs"),
    [("llm", LAYERS, 4), ("visual", LAYERS, 3), ("audio", 2, 4), ("action", LAYERS, 4)],
)
def test_attention_takes_at_most_a_mask_and_gives_one_result(graphs, part, layers, inputs):
    """TensorRT's parser accepts neither a past nor lengths nor a second output."""
    nodes = [node for node in graphs[part].node if node.op_type == "Attention"]
    assert len(nodes) == layers
    for node in nodes:
        assert len(node.input) == inputs
        assert len(node.output) == 1
        assert [attribute.name for attribute in node.attribute] == ["scale"]


def test_caches_are_graph_inputs_scattered_into_graph_outputs(graphs):
    """TensorRT's KV-cache layer allows no node between input, scatter and output."""
    graph = graphs["llm"]
    outputs = {value.name for value in graph.output}
    scatters = [node for node in graph.node if node.op_type == "TensorScatter"]
    caches = [f"{kind}_cache_{i}" for i in range(LAYERS) for kind in ("key", "value")]
    assert [node.input[0] for node in scatters] == caches
    assert [node.output[0] for node in scatters] == [
        f"present_{name.replace('_cache', '')}" for name in caches
    ]
    assert {node.output[0] for node in scatters} <= outputs


def test_the_action_graph_takes_only_the_first_rows_of_the_caches(graphs):
    """The number of rows is a size of an input, which TensorRT knows before it runs."""
    nodes = graphs["action"].node
    sizes = {node.output[0]: node.input[0] for node in nodes if node.op_type == "Shape"}
    readers = defaultdict(list)
    for node in nodes:
        for name in node.input:
            readers[name].append(node)
    for i in range(LAYERS):
        for cache in (f"key_cache_{i}", f"value_cache_{i}"):
            (reader,) = readers[cache]
            assert reader.op_type == "Slice"
            assert sizes[reader.input[2]] == "cache_rows"


def test_nodes_are_named_after_the_modules(graphs):
    names = {part: {node.name for node in graph.node} for part, graph in graphs.items()}
    assert "/layers.0/attn/qkv_proj/MatMul" in names["llm"]
    assert "/layers.2/mlp/down_proj/MatMul" in names["llm"]
    assert "/blocks.1/attn/qkv/MatMul" in names["visual"]
    assert "/merger_list.0/mlp.2/MatMul" in names["visual"]
    assert "/conv2d2/Conv" in names["audio"]
    assert "/layers.1/self_attn/out_proj/MatMul" in names["audio"]
    assert "/layers.1/attn/qkv_proj/MatMul" in names["action"]
    for part, graph in graphs.items():
        assert len(names[part]) == len(graph.node)


def test_cache_written_in_place_equals_a_copied_one(sessions):
    session, inputs = sessions["llm"], llm_inputs(2, 5, start=30)
    names = [output.name for output in session.get_outputs()]
    expected = dict(zip(names, session.run(None, inputs), strict=True))
    binding = session.io_binding()
    kept = {
        name: onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))
        for name, array in inputs.items()
    }
    for name, value in kept.items():
        binding.bind_ortvalue_input(name, value)
        if "_cache_" in name:
            binding.bind_ortvalue_output("present_" + name.replace("_cache", ""), value)
    binding.bind_output("logits", "cpu")
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(binding.get_outputs()[-1].numpy(), expected["logits"])
    for name, value in kept.items():
        if "_cache_" in name:
            np.testing.assert_array_equal(value.numpy(), expected["present_" + name.replace("_cache", "")])


def test_cache_rows_outside_the_new_ones_stay_as_they_are(sessions):
    inputs = llm_inputs(1, 4, start=10)
    _, keys, *_ = sessions["llm"].run(None, inputs)
    before = inputs["key_cache_0"]
    np.testing.assert_array_equal(keys[:, :, :10], before[:, :, :10])
    np.testing.assert_array_equal(keys[:, :, 14:], before[:, :, 14:])
    assert np.abs(keys[:, :, 10:14] - before[:, :, 10:14]).min() > 0


def test_tokens_one_by_one_equal_tokens_at_once(sessions):
    """Prefill and decode are the same graph: the last logits agree up to rounding."""
    inputs = llm_inputs(1, 6, start=0)
    at_once, *_ = sessions["llm"].run(["logits"], inputs)
    caches = {name: array for name, array in inputs.items() if "_cache_" in name}
    for token in range(6):
        step = {name: array[:, token : token + 1] for name, array in inputs.items() if array.ndim == 3}
        step |= {"attention_mask": inputs["attention_mask"][:, :, token : token + 1]}
        step |= {"kv_write_index": np.array([token]), "last_token_ids": np.array([[0]])}
        logits, *presents = sessions["llm"].run(None, step | caches)
        caches = dict(zip(caches, presents, strict=True))
    np.testing.assert_allclose(logits, at_once, atol=1e-4)


def test_a_sequence_has_the_same_bits_alone_padded_and_in_a_batch(sessions):
    session = sessions["llm"]
    batch = llm_inputs(3, 7, start=12)
    together = session.run(None, batch)
    padded = llm_inputs(3, 11, start=12, seed=1)
    for name, array in batch.items():
        if array.ndim == 3:
            padded[name][:, :7] = array
        elif name != "attention_mask":
            padded[name] = array
    assert np.array_equal(session.run(None, padded)[0], together[0])
    for b in range(3):
        alone = session.run(None, {name: array[b : b + 1] for name, array in batch.items()})
        for found, expected in zip(alone, together, strict=True):
            np.testing.assert_array_equal(found[0], expected[b])


def test_logits_of_several_tokens_can_be_requested(sessions):
    """Logits of several rows equal those of each row alone.

    Tree verification needs this.
    """
    inputs = llm_inputs(2, 5, start=3)
    wanted = np.array([[4, 0, 2], [1, 1, 3]])
    logits, *_ = sessions["llm"].run(["logits"], inputs | {"last_token_ids": wanted})
    for n in range(3):
        one, *_ = sessions["llm"].run(["logits"], inputs | {"last_token_ids": wanted[:, n : n + 1]})
        np.testing.assert_allclose(logits[:, n : n + 1], one, atol=1e-5)


def test_masked_cache_rows_do_not_influence_the_language_model(sessions):
    inputs = llm_inputs(1, 3, start=5)
    logits, *_ = sessions["llm"].run(["logits"], inputs)
    for name in inputs:
        if "_cache_" in name:
            inputs[name][:, :, 8:] = 1e6
    np.testing.assert_array_equal(sessions["llm"].run(["logits"], inputs)[0], logits)


def test_cache_rows_beyond_the_length_do_not_influence_the_expert(sessions):
    inputs = action_inputs(3)
    (velocity,) = sessions["action"].run(None, inputs)
    for name in inputs:
        if name.startswith(("key_cache", "value_cache")):
            inputs[name][:, :, 20:] = 1e3
    np.testing.assert_array_equal(sessions["action"].run(None, inputs)[0], velocity)
    inputs["key_cache_0"][:, :, 19] += 1
    assert np.abs(sessions["action"].run(None, inputs)[0] - velocity).max() > 1e-6


def test_samples_do_not_influence_each_other(sessions):
    inputs = action_inputs(3)
    (together,) = sessions["action"].run(None, inputs)
    for n in range(3):
        alone = inputs | {"trajectory": inputs["trajectory"][n : n + 1]}
        np.testing.assert_allclose(sessions["action"].run(None, alone)[0][0], together[n], atol=1e-5)


@pytest.mark.parametrize("rows", [20, CAPACITY])
def test_the_velocity_does_not_depend_on_how_many_rows_of_the_cache_are_read(sessions, rows):
    (velocity,) = sessions["action"].run(None, action_inputs(2))
    (other,) = sessions["action"].run(None, action_inputs(2, rows))
    np.testing.assert_allclose(other, velocity, atol=1e-6)


def test_the_action_graph_for_cuda_computes_what_the_standard_graph_computes(tiny_engine, sessions):
    """ONNX Runtime has the operators of the graph for CUDA on a CPU too."""
    variant = open_session(tiny_engine / "action" / "model.cuda.onnx")
    for samples, rows in ((1, 20), (3, 30), (2, CAPACITY)):
        inputs = action_inputs(samples, rows)
        (expected,) = sessions["action"].run(None, inputs)
        np.testing.assert_allclose(variant.run(None, inputs)[0], expected, atol=1e-6)
