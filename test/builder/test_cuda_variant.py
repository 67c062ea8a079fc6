# SPDX-License-Identifier: Apache-2.0
"""The language model's graph for ONNX Runtime's CUDA provider computes what the one with a mask computes."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnxruntime
import pytest
from safetensors.numpy import load_file
from test_graph_contract import llm_inputs
from tiny_checkpoint import write_json, write_tiny_checkpoint

from edgellm_ros.builder import export
from edgellm_ros.engine.onnxruntime_session import open_session

FIRST_WITH_LENGTHS = (1, 28)
VERSION = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])
knows_lengths = pytest.mark.skipif(
    VERSION < FIRST_WITH_LENGTHS,
    reason="this ONNX Runtime aligns causal attention over a longer cache in another way",
)


@pytest.fixture(scope="module")
def tied_engine(tmp_path_factory):
    """The tiny engine, but its last layer is the embedding table."""
    directory = tmp_path_factory.mktemp("tied")
    checkpoint = write_tiny_checkpoint(directory / "checkpoint")
    config = json.loads((checkpoint / "config.json").read_text())
    write_json(checkpoint / "config.json", config | {"tie_word_embeddings": True})
    export(checkpoint, directory / "engine")
    return directory / "engine"


def variant_inputs(inputs, engine):
    """The same, as the variant takes them."""
    rows, tokens = inputs["kv_write_index"], inputs["inputs_embeds"].shape[1]
    table = load_file(engine / "embedding.safetensors")["embedding"]
    others = {name: array for name, array in inputs.items() if name != "attention_mask"}
    return others | {"kv_length": rows + tokens, "embedding": table}


@knows_lengths
@pytest.mark.parametrize(("batch", "tokens", "start"), [(1, 9, 0), (3, 7, 12), (1, 1, 0), (4, 1, 300)])
@pytest.mark.parametrize("tied", [False, True])
def test_each_token_sees_the_cache_up_to_its_own_row(tiny_engine, tied_engine, batch, tokens, start, tied):
    engine = tied_engine if tied else tiny_engine
    inputs = llm_inputs(batch, tokens, start)
    inputs["kv_write_index"] = start + np.arange(batch)  # sequences of different lengths
    seen = inputs["kv_write_index"][:, None] + np.arange(tokens)
    inputs["attention_mask"] = (np.arange(448) <= seen[:, :, None])[:, None]
    expected = open_session(engine / "llm" / "model.onnx").run(None, inputs)
    variant = open_session(engine / "llm" / "model.cuda.onnx")
    names = {value.name for value in variant.get_inputs()}
    found = variant.run(None, {k: v for k, v in variant_inputs(inputs, engine).items() if k in names})
    for mine, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, other, atol=2e-5)


def test_both_graphs_share_one_file_of_weights(tiny_engine):
    found = []
    for name in ("model.onnx", "model.cuda.onnx"):
        model = onnx.load(tiny_engine / "llm" / name, load_external_data=False)
        weights = {w.name: [(e.key, e.value) for e in w.external_data] for w in model.graph.initializer}
        found.append({name: places for name, places in weights.items() if places})
    original, variant = found
    assert variant.items() <= original.items()
    assert {dict(places)["location"] for places in variant.values()} == {"model.onnx.data"}
    assert len(variant) >= len(original) - 1  # the head may be the embedding table, which is an input


def test_attention_of_the_variant_has_lengths_in_place_of_a_mask(tiny_engine):
    graph = onnx.load(tiny_engine / "llm" / "model.cuda.onnx", load_external_data=False).graph
    for node in (node for node in graph.node if node.op_type == "Attention"):
        assert list(node.input[3:]) == ["", "", "", "kv_length"]
        assert {a.name: a.i for a in node.attribute if a.name == "is_causal"} == {"is_causal": 1}


def test_the_head_is_the_embedding_table_only_where_the_checkpoint_says_so(tiny_engine, tied_engine):
    for engine, tied in ((tiny_engine, False), (tied_engine, True)):
        graph = onnx.load(engine / "llm" / "model.cuda.onnx", load_external_data=False).graph
        assert ("embedding" in {value.name for value in graph.input}) == tied
