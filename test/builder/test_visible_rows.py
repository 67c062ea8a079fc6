# SPDX-License-Identifier: Apache-2.0
"""On a CPU, cutting a cache behind its visible rows changes no bit of attention."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from edgellm_ros.builder.passes import visible_rows
from edgellm_ros.builder.passes.visible_rows import attend_to_visible_rows
from fixtures.graphs import BOOL, FLOAT, INT64, helper, save_model

HEADS, KV_HEADS, SIZE, CAPACITY = 4, 2, 64, 448
RUNS = [  # sequences, tokens of each, committed rows
    pytest.param(1, 1, 0, id="a first token"),
    pytest.param(2, 1, 130, id="a decode step"),
    pytest.param(1, 1, 440, id="a decode step at the end"),
    pytest.param(1, 103, 0, id="a prompt"),
    pytest.param(3, 40, 100, id="prompts after prefixes"),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A graph with two layers over one mask."""
    cache = ["B", KV_HEADS, CAPACITY, SIZE]
    nodes, inputs, outputs = [], {"q": (FLOAT, ["B", HEADS, "S", SIZE])}, {}
    for i in range(2):
        for kind in ("key", "value"):
            inputs |= {
                f"{kind}_{i}": (FLOAT, ["B", KV_HEADS, "S", SIZE]),
                f"{kind}_cache_{i}": (FLOAT, cache),
            }
            outputs[f"present_{kind}_{i}"] = (FLOAT, cache)
            written = [f"{kind}_cache_{i}", f"{kind}_{i}", "kv_write_index"]
            nodes.append(helper.make_node("TensorScatter", written, [f"present_{kind}_{i}"], axis=-2))
        q = "q" if i == 0 else f"y_{i - 1}"
        seen = [q, f"present_key_{i}", f"present_value_{i}", "mask"]
        nodes.append(helper.make_node("Attention", seen, [f"y_{i}"], name=f"attention_{i}", scale=SIZE**-0.5))
    inputs |= {"kv_write_index": (INT64, ["B"]), "mask": (BOOL, ["B", 1, "S", CAPACITY])}
    outputs["y_1"] = (FLOAT, ["B", HEADS, "S", SIZE])
    return save_model(tmp_path_factory.mktemp("cached") / "model.onnx", nodes, inputs, outputs)


def make_inputs(batch: int, tokens: int, start: int) -> dict[str, np.ndarray]:
    """Return random inputs; sequence b has `start` - 2 b committed rows."""
    rng = np.random.default_rng(0)

    def random(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    starts = np.maximum(start - 2 * np.arange(batch), 0)
    last = starts[:, None] + np.arange(tokens)
    inputs = {"q": random(batch, HEADS, tokens, SIZE), "kv_write_index": starts}
    inputs["mask"] = (np.arange(CAPACITY) <= last[..., None])[:, None]
    for name in ("key_0", "value_0", "key_1", "value_1"):
        inputs[name] = random(batch, KV_HEADS, tokens, SIZE)
        inputs[name.replace("_", "_cache_")] = random(batch, KV_HEADS, CAPACITY, SIZE)
    return inputs


def assert_same_results(path, inputs) -> None:
    model = ir.load(path)
    assert attend_to_visible_rows(model.graph)
    graphs = (ir.to_proto(model).SerializeToString(), str(path))
    found, expected = (
        onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"]).run(None, inputs)
        for graph in graphs
    )
    for array, reference in zip(found, expected, strict=True):
        np.testing.assert_array_equal(array, reference)


@pytest.mark.parametrize("small", [CAPACITY, 0], ids=["always", "where it pays"])
@pytest.mark.parametrize(("batch", "tokens", "start"), RUNS)
def test_cutting_the_cache_changes_no_bit(path, monkeypatch, batch, tokens, start, small):
    monkeypatch.setattr(visible_rows, "SMALL", small)
    assert_same_results(path, make_inputs(batch, tokens, start))


def test_a_mask_may_show_any_rows(path):
    """The rows of a request may see different rows of the cache, even later ones."""
    inputs = make_inputs(2, 5, 70)
    inputs["mask"][1, 0, 2, 70:72] = False
    inputs["mask"][0, 0, 3, 300] = True
    assert_same_results(path, inputs)


@pytest.mark.parametrize(
    ("tokens", "start", "rows"), [(1, 63, 64), (1, 64, 128), (40, 100, 192), (8, 440, 448)]
)
def test_rows_that_no_token_sees_are_not_computed(path, tokens, start, rows):
    """The attention of the first layer gets so many rows."""
    model = ir.load(path)
    attend_to_visible_rows(model.graph)
    changed = ir.to_proto(model)
    (node,) = [node for node in changed.graph.node if node.name == "attention_0"]
    changed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in node.input[1:4])
    session = onnxruntime.InferenceSession(changed.SerializeToString(), providers=["CPUExecutionProvider"])
    keys, values, mask = session.run(list(node.input[1:4]), make_inputs(1, tokens, start))
    assert keys.shape == values.shape == (1, KV_HEADS, rows, SIZE)
    assert mask.shape == (1, 1, tokens, rows)


@pytest.mark.parametrize(("start", "cut"), [(63, True), (319, True), (320, False), (447, False)])
def test_a_large_cache_is_cut_up_to_three_quarters(path, monkeypatch, start, cut):
    """One token behind `start` of 448 rows; multiples of 64 are computed."""
    monkeypatch.setattr(visible_rows, "SMALL", 0)
    model = ir.load(path)
    attend_to_visible_rows(model.graph)
    changed = ir.to_proto(model)
    (condition,) = {node.input[0] for node in changed.graph.node if node.op_type == "If"}
    changed.graph.output.append(onnx.ValueInfoProto(name=condition))
    session = onnxruntime.InferenceSession(changed.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run([condition], make_inputs(1, 1, start))
    assert found.tolist() == [cut]


def test_a_graph_without_a_cache_stays_as_it_is(path):
    model = ir.load(path)
    caches = {value.name: value for value in model.graph.inputs}
    for node in model.graph:
        if node.op_type == "Attention":
            node.replace_input_with(1, caches[str(node.inputs[1].name).replace("present_key", "key_cache")])
    before = [node.name for node in model.graph]
    assert not attend_to_visible_rows(model.graph)
    assert [node.name for node in model.graph] == before
