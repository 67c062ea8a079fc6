# SPDX-License-Identifier: Apache-2.0
"""The LLM graph for CUDA computes what the graph with a mask computes.

The graph is for ONNX Runtime's CUDA provider.
"""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file, save_file

from edgellm_ros.builder import export
from edgellm_ros.engine.device import CpuDevice
from edgellm_ros.engine_directory.config import EngineConfig
from fixtures.cuda_graphs import compute, variant_inputs
from fixtures.decoder_checkpoint import write_decoder_checkpoint
from fixtures.exported_graphs import knows_lengths, llm_inputs
from fixtures.tiny_checkpoint import write_json, write_tiny_checkpoint
from fixtures.vision_families import VISION_DECODERS


@pytest.fixture(scope="module")
def tied_checkpoint(tmp_path_factory):
    """The tiny checkpoint with the embedding table as LM head."""
    checkpoint = write_tiny_checkpoint(tmp_path_factory.mktemp("tied"), shards=1)
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, checkpoint / "model.safetensors")
    config = json.loads((checkpoint / "config.json").read_text())
    write_json(checkpoint / "config.json", config | {"tie_word_embeddings": True})
    return checkpoint


@pytest.fixture(scope="module")
def engines(tiny_checkpoint, tied_checkpoint, tmp_path_factory):
    """Engine directories by name."""
    found = {}
    windows = write_decoder_checkpoint(tmp_path_factory.mktemp("mistral") / "m", "mistral", hidden_size=48)
    for name, checkpoint, options in (
        ("fp32", tiny_checkpoint, {}),
        ("tied", tied_checkpoint, {}),
        ("hidden states", tiny_checkpoint, {"hidden_state_layers": (1, 3)}),
        ("fp16", tiny_checkpoint, {"precision": "fp16"}),
        ("fp16 tied", tied_checkpoint, {"precision": "fp16"}),
        ("windows tied", windows, {}),
        ("fp16 windows tied", windows, {"precision": "fp16"}),
        *((name, write(tmp_path_factory.mktemp(name) / name), {}) for name, write in VISION_DECODERS.items()),
    ):
        found[name] = tmp_path_factory.mktemp("engine")
        export(checkpoint, found[name], **options)
    return found


NAMES = ("fp32", "tied", "hidden states", "fp16", "fp16 tied", "windows tied", "fp16 windows tied")
NAMES += tuple(VISION_DECODERS)


@pytest.mark.slow
@knows_lengths
@pytest.mark.only_on("cpu", "cuda", reason="TensorRT uses the graph with a mask")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("batch", "tokens", "start"), [(1, 9, 0), (1, 7, 12), (1, 1, 0), (4, 1, 300)])
def test_the_cuda_variant_equals_the_graph_with_a_mask(device, engines, name, batch, tokens, start):
    if name in ("fp16", "fp16 tied") and device.memory == "cpu":
        pytest.skip("ONNX Runtime's GroupQueryAttention norms queries and keys on CUDA only: --device cuda")
    config = EngineConfig.load(engines[name])
    inputs = llm_inputs(batch, tokens, start, layers=config.num_decoder_layers, head_dim=config.head_dim)
    inputs["kv_write_index"] = start + np.arange(batch)  # sequences of different lengths
    seen = inputs["kv_write_index"][:, None] + np.arange(tokens)
    inputs["attention_mask"] = (np.arange(448) <= seen[:, :, None])[:, None]
    folder = engines[name] / "llm"
    expected = compute(folder / "model.onnx", CpuDevice(), inputs)
    found = compute(folder / "model.cuda.onnx", device, variant_inputs(inputs, engines[name]))
    tolerance = 2e-2 if "fp16" in name else 2e-5
    for output, values in expected.items():
        np.testing.assert_allclose(
            found[output], values, atol=tolerance * np.abs(values).max(), err_msg=output
        )


@knows_lengths
@pytest.mark.only_on("cpu", "cuda", reason="TensorRT uses the graph with a mask")
@pytest.mark.parametrize("name", ["fp16", "fp16 tied", "fp16 windows tied"])
@pytest.mark.parametrize("tokens", [2, 9, 48])
def test_prompts_of_several_sequences_run_together_in_half_precision(device, engines, name, tokens):
    on_cpu = device.memory == "cpu"
    if name != "fp16 windows tied" and on_cpu:
        pytest.skip("ONNX Runtime's GroupQueryAttention norms queries and keys on CUDA only: --device cuda")
    config = EngineConfig.load(engines[name])
    inputs = llm_inputs(3, tokens, 0, layers=config.num_decoder_layers, head_dim=config.head_dim)
    if on_cpu:  # where every sequence is rotated as the first one is
        for rows in ("rope_cos", "rope_sin"):
            inputs[rows] = np.repeat(inputs[rows][:1], 3, axis=0)
    folder = engines[name] / "llm"
    expected = compute(folder / "model.onnx", CpuDevice(), inputs)
    found = compute(folder / "model.cuda.onnx", device, variant_inputs(inputs, engines[name]))
    for output, values in expected.items():
        written = values[:, :, :tokens] if output.startswith("present") else values
        same = found[output][:, :, :tokens] if output.startswith("present") else found[output]
        np.testing.assert_allclose(same, written, atol=2e-2 * np.abs(written).max(), err_msg=output)


def test_both_graphs_share_one_file_of_weights(tiny_engine):
    found = []
    for name in ("model.onnx", "model.cuda.onnx"):
        model = onnx.load(tiny_engine / "llm" / name, load_external_data=False)
        weights = {w.name: [(e.key, e.value) for e in w.external_data] for w in model.graph.initializer}
        found.append({name: places for name, places in weights.items() if places})
    original, variant = found
    assert variant.items() <= original.items()
    assert {dict(places)["location"] for places in variant.values()} == {"model.onnx.data"}
    assert len(variant) >= len(original) - 1  # the LM head may be the embedding table, which is an input


def test_attention_is_fused_in_half_precision_and_standard_onnx_in_fp32(engines):
    for name, operator in (("fp32", "Attention"), ("fp16", "GroupQueryAttention")):
        graph = onnx.load(engines[name] / "llm" / "model.cuda.onnx", load_external_data=False).graph
        assert sum(node.op_type == operator for node in graph.node) == 3
        assert ("RotaryEmbedding" in {node.op_type for node in graph.node}) == (name == "fp32")


def test_the_embedding_table_is_the_lm_head_only_in_tied_checkpoints(engines):
    for name in ("fp32", "tied", "fp16", "fp16 tied"):
        graph = onnx.load(engines[name] / "llm" / "model.cuda.onnx", load_external_data=False).graph
        assert ("embedding" in {value.name for value in graph.input}) == ("tied" in name)
