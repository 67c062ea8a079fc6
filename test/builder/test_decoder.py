# SPDX-License-Identifier: Apache-2.0
"""The shared decoder's graph: sliding windows, and heads that are rotated in part.

The windows are those of drafted tokens.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgellm_ros.builder import export
from edgellm_ros.builder.checkpoint.checkpoint_config import read_section
from edgellm_ros.builder.families import llama
from edgellm_ros.builder.graph.lm_head import LMHead
from edgellm_ros.builder.lowering.onnxruntime.decoder import build_onnxruntime_llm
from edgellm_ros.builder.lowering.options import LLMOptions
from edgellm_ros.builder.lowering.standard.decoder import build_llm
from edgellm_ros.builder.model.decoder import Decoder
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.engine.device import CpuDevice
from edgellm_ros.engine.executor import EngineExecutor
from edgellm_ros.engine_directory.rope_config import RopeConfig
from fixtures.decoder_checkpoint import write_decoder_checkpoint
from fixtures.on_device import put

pytestmark = pytest.mark.only_on("cpu", reason="what the graph computes is the same for every device")
CAPACITY = 96


def test_drafted_rows_of_a_tree_have_the_window_of_their_position(tmp_path):
    """Two branches after the same prompt give the logits that each gives alone."""
    checkpoint = write_decoder_checkpoint(tmp_path / "checkpoint", "mistral", sliding_window=6)
    config = export(checkpoint, tmp_path / "engine", max_input_len=64, max_kv_cache_capacity=CAPACITY)
    graph, rope = tmp_path / "engine" / "llm" / "model.onnx", config.llm.rope
    embeds = np.random.default_rng(0).standard_normal((14, config.llm.hidden_size))
    prompt, first, second = embeds[:10], embeds[10:12], embeds[12:]
    causal = np.tri(14, dtype=bool)
    tree = causal.copy()
    tree[12:, 10:12] = False  # the second branch does not see the first
    positions = np.array([*range(12), 10, 11])
    together = run(graph, rope, embeds, tree, positions)
    assert np.isfinite(together).all()
    for branch, rows in ((first, [10, 11]), (second, [12, 13])):
        rows_alone = np.concatenate([prompt, branch])
        alone = run(graph, rope, rows_alone, causal[:12, :12], np.arange(12))
        np.testing.assert_allclose(together[rows], alone[10:], atol=1e-5)


def run(path: Path, rope: RopeConfig, embeds, seen, positions) -> np.ndarray:
    """Run the graph once from an empty cache: logits of all tokens [S,V]."""
    device, count = CpuDevice(), len(embeds)
    executor = EngineExecutor.open(path, device)
    angles = positions[:, None] * np.array(rope.frequencies)
    mask = np.zeros((1, 1, count, CAPACITY), bool)
    mask[0, 0, :, :count] = seen
    values = {
        "inputs_embeds": embeds[None],
        "rope_cos": np.cos(angles)[None],
        "rope_sin": np.sin(angles)[None],
        "kv_write_index": np.array([0]),
        "attention_mask": mask,
        "last_token_ids": np.arange(count)[None],
    }
    dims, tensors = {"B": 1, "S": count, "N": count}, {}
    for name, binding in executor.bindings.items():
        shape = tuple(dims.get(dim, dim) for dim in binding.shape)
        if name in values:
            tensors[name] = put(device, values[name].astype(binding.dtype))
        elif "present" in name:
            kind, layer = name.removeprefix("present_").split("_")
            tensors[name] = tensors[f"{kind}_cache_{layer}"]
        else:
            tensors[name] = put(device, np.zeros(shape, binding.dtype))
    executor.prepare(0, dims, tensors, device.stream)
    executor.execute(device.stream)
    return device.download(tensors["logits"])[0]


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    return write_decoder_checkpoint(tmp_path / "checkpoint", "llama", num_key_value_heads=4)


def decoder_with(checkpoint: Path, frequencies: list[float]) -> Decoder:
    """Read a decoder, and replace the frequencies of its RoPE."""
    decoder = llama.read_decoder(read_section(checkpoint / "config.json"))
    rope = dataclasses.replace(decoder.config.rope, frequencies=tuple(frequencies))
    return dataclasses.replace(decoder, config=dataclasses.replace(decoder.config, rope=rope))


def options_of(decoder: Decoder, weights: Weights) -> LLMOptions:
    sizes = decoder.config.vocab_size, decoder.config.hidden_size
    return LLMOptions("fp32", CAPACITY, LMHead(weights, decoder.embedding, *sizes, is_embedding=True))


def permuted(checkpoint: Path, order: np.ndarray) -> Path:
    """Write a copy of a checkpoint with the values of each head in another order.

    The heads are those of queries and keys.
    """
    tensors = load_file(checkpoint / "model.safetensors")
    for name, values in tensors.items():
        if "q_proj" in name or "k_proj" in name:
            heads = values.reshape(-1, len(order), *values.shape[1:])
            tensors[name] = np.ascontiguousarray(heads[:, order]).reshape(values.shape)
    copy = checkpoint.with_name("permuted")
    copy.mkdir()
    save_file(tensors, copy / "model.safetensors")
    return copy


def test_a_head_may_be_rotated_in_part(checkpoint, tmp_path):
    """A head rotated in part equals a whole one whose other pairs have frequency 0.

    The whole head has the values in another order.
    """
    partial = [1.0, 0.3, 0.05]  # the first 6 of 16 values
    whole = [*partial, 0, 0, 0, 0, 0]  # value i is rotated with value i + 8
    order = np.array([0, 1, 2, 6, 7, 8, 9, 10, 3, 4, 5, 11, 12, 13, 14, 15])
    embeds = np.random.default_rng(0).standard_normal((20, 64))
    logits = []
    for name, frequencies, source in (
        ("partial", partial, checkpoint),
        ("whole", whole, permuted(checkpoint, order)),
    ):
        decoder, weights = decoder_with(checkpoint, frequencies), Weights(source)
        graph = build_llm(decoder, weights, options_of(decoder, weights))
        path, _ = graph.save(tmp_path / name / "model.onnx")
        logits.append(run(path, decoder.config.rope, embeds, np.tri(20, dtype=bool), np.arange(20)))
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-4)
    still = dataclasses.replace(decoder.config.rope, frequencies=(0.0,) * 8)
    assert np.abs(logits[0] - run(path, still, embeds, np.tri(20, dtype=bool), np.arange(20))).max() > 0.1


def test_both_graphs_rotate_the_same_part_of_a_head(checkpoint):
    decoder, weights = decoder_with(checkpoint, [1.0, 0.3, 0.05]), Weights(checkpoint)
    options = options_of(decoder, weights)
    for build in (build_llm, build_onnxruntime_llm):
        nodes = [node for node in build(decoder, weights, options).graph if node.op_type == "RotaryEmbedding"]
        assert len(nodes) == 6
        assert {node.attributes["rotary_embedding_dim"].as_int() for node in nodes} == {6}


@pytest.mark.parametrize("prefix", ["model.language_model", "language_model.model", "thinker.model"])
def test_a_decoder_of_a_larger_model_computes_the_same_and_takes_the_same_adapters(
    checkpoint, tmp_path, prefix
):
    copy = checkpoint.with_name("larger")
    copy.mkdir()
    tensors = load_file(checkpoint / "model.safetensors")
    renamed = {name.replace("model.", f"{prefix}.", 1): values for name, values in tensors.items()}
    save_file(renamed, copy / "model.safetensors")
    section, embeds = read_section(checkpoint / "config.json"), np.random.default_rng(0).random((9, 64))
    logits, inputs = [], []
    for name, source in (("model", checkpoint), (prefix, copy)):
        decoder, weights = llama.read_decoder(section, name), Weights(source)
        options = options_of(decoder, weights)
        path, _ = build_llm(decoder, weights, options).save(tmp_path / name / "model.onnx")
        logits.append(run(path, decoder.config.rope, embeds, np.tri(9, dtype=bool), np.arange(9)))
        with_lora = build_llm(decoder, weights, dataclasses.replace(options, lora=True))
        inputs.append([value.name for value in with_lora.graph.inputs])
    np.testing.assert_array_equal(logits[0], logits[1])
    assert inputs[0] == inputs[1]
    assert "model.layers.0.self_attn.o_proj.lora_A.weight" in inputs[0]
