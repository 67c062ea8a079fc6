# SPDX-License-Identifier: Apache-2.0
"""Products with blocks for a CPU that multiplies in 8 bits."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file

from edgellm_ros.builder import export
from edgellm_ros.engine.device import CpuDevice
from edgellm_ros.engine.onnxruntime.session import open_session
from edgellm_ros.engine_directory.config import EngineConfig
from fixtures.cuda_graphs import compute, variant_inputs
from fixtures.gguf_files import LAYERS, write_gguf

KINDS = ("Q4_0", "Q4_1", "Q8_0", "Q6_K")


@pytest.fixture(scope="module", params=KINDS)
def engines(request, tmp_path_factory):
    """A model without and with products in 8 bits."""
    folder = tmp_path_factory.mktemp(request.param)
    path, limits = folder / "model.gguf", {"max_input_len": 64, "max_kv_cache_capacity": 128}
    write_gguf(path, "llama", request.param)
    for wanted in (False, True):
        export(path, folder / str(wanted), cpu_int8=wanted, **limits)
    return folder / "False", folder / "True"


def causal_inputs(engine, tokens: int) -> dict[str, np.ndarray]:
    """Make the inputs of a prompt of random embeddings."""
    config, rng = EngineConfig.load(engine), np.random.default_rng(0)
    capacity, half = config.max_kv_cache_capacity, config.head_dim // 2
    angles = np.outer(np.arange(tokens), 50000.0 ** (-np.arange(half) / half))[None]
    cache = np.zeros((1, config.num_kv_heads, capacity, config.head_dim), np.float32)
    return {
        "inputs_embeds": rng.standard_normal((1, tokens, config.hidden_size)).astype(np.float32),
        "rope_cos": np.cos(angles).astype(np.float32),
        "rope_sin": np.sin(angles).astype(np.float32),
        "kv_write_index": np.zeros(1, np.int64),
        "attention_mask": (np.arange(capacity) <= np.arange(tokens)[:, None])[None, None],
        "last_token_ids": np.array([[tokens - 1]]),
        **{f"{part}_cache_{i}": cache.copy() for part in ("key", "value") for i in range(LAYERS)},
    }


def logits(engine, inputs) -> np.ndarray:
    return compute(engine / "llm/model.cpu.onnx", CpuDevice(), variant_inputs(inputs, engine))["logits"]


def test_all_products_round_their_input_to_8_bits(engines):
    graph = onnx.load(engines[1] / "llm/model.cpu.onnx", load_external_data=False).graph
    kinds = Counter(node.op_type for node in graph.node)
    assert kinds["MatMulNBits"] == 4 * LAYERS + 1  # and the LM head
    assert kinds["DequantizeLinear"] == 0
    assert kinds["MatMulIntegerToFloat"] == 0  # offsets stay in fp32
    products = (node for node in graph.node if node.op_type == "MatMulNBits")
    attributes = (each for node in products for each in node.attribute)
    assert {each.i for each in attributes if each.name == "accuracy_level"} == {4}


def test_logits_are_those_of_products_in_fp32_up_to_rounding(engines):
    expected, found = (logits(engine, causal_inputs(engine, tokens=9)) for engine in engines)
    assert 0 < np.abs(found - expected).max() < 0.1 * expected.std()


def test_a_nan_reaches_the_logits(engines):
    inputs = causal_inputs(engines[1], tokens=3)
    inputs["inputs_embeds"][0, -1, 5] = np.nan
    assert np.isnan(logits(engines[1], inputs)).all()


def test_an_lm_head_of_q8_0_keeps_its_blocks(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", "llama", "Q8_0")
    export(path, tmp_path / "engine", cpu_int8=True, max_input_len=64, max_kv_cache_capacity=128)
    model = onnx.load(tmp_path / "engine/llm/model.cpu.onnx")
    tensors = {each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer}
    packed = next(each for name, each in tensors.items() if name.endswith(".blocks.packed"))
    scales = next(each for name, each in tensors.items() if name.endswith(".blocks.packed_scale"))
    weights = (packed.astype(np.float32) - 128) * scales[:, :, None]
    embedding = load_file(tmp_path / "engine/embedding.safetensors")["embedding"]
    np.testing.assert_allclose(weights.reshape(embedding.shape), embedding, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 9])
def test_an_outlier_rounds_the_inputs_of_its_own_block_only(tmp_path, bits, rows):
    rng, outputs, blocks, size = np.random.default_rng(0), 48, 8, 32
    x = rng.standard_normal((rows, blocks * size)).astype(np.float32)
    x[:, 0] = 1000.0
    weights = rng.integers(-8, 8, (outputs, blocks, size))
    weights[:, 0] = 0  # what remains is the product of the other blocks
    unsigned = (weights + 2 ** (bits - 1)).astype(np.uint8)
    packed = unsigned[..., ::2] | unsigned[..., 1::2] << 4 if bits == 4 else unsigned
    scales = np.ones((outputs, blocks), np.float32)
    node = onnx.helper.make_node(
        "MatMulNBits", ["x", "packed", "scales"], ["y"], domain="com.microsoft", bits=bits, block_size=size,
        K=blocks * size, N=outputs, accuracy_level=4,
    )  # fmt: skip
    values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in "xy"]
    tensors = [onnx.numpy_helper.from_array(packed, "packed"), onnx.numpy_helper.from_array(scales, "scales")]
    graph = onnx.helper.make_graph([node], "product", values[:1], values[1:], tensors)
    domains = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=domains, ir_version=10), tmp_path / "model.onnx")
    (y,) = open_session(tmp_path / "model.onnx").run(None, {"x": x})
    expected = x @ weights.reshape(outputs, -1).T
    assert np.abs(y - expected).max() < 0.02 * np.abs(expected).max()
