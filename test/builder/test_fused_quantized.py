# SPDX-License-Identifier: Apache-2.0
"""Quantised weights for the fused kernels.

The weights are in `llm/model.cuda.onnx` and `llm/fused.json`.
"""

from __future__ import annotations

import dataclasses

import gguf
import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest

from doubles.quantized_weights import unpacked
from edgellm_ros.builder import export
from edgellm_ros.builder.checkpoint.checkpoint_config import read_section
from edgellm_ros.builder.graph.graph import GraphBuilder
from edgellm_ros.builder.graph.product import quantized_product
from edgellm_ros.builder.quantization.layouts import find_layout
from edgellm_ros.builder.quantization.matrix import FLOAT8, INT4, INT8, QuantizedMatrix, join
from edgellm_ros.builder.weights.weights import Weights
from edgellm_ros.fused.description.decoder import FUSED_FILE, FusedModel
from edgellm_ros.fused.loading.device_weights import fused_shape
from edgellm_ros.fused.plan.quantized import Quantized
from fixtures import quantized_checkpoint
from fixtures.decoder_checkpoint import write_decoder_checkpoint
from fixtures.fused_steps import changed
from fixtures.gguf_files import write_gguf
from fixtures.quantized_checkpoint import write_quantized_checkpoint
from fixtures.random_head import base_config, write_random_head

LAYER = "model.layers.0"
PARTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
# Groups of 32 of 64 inputs, every other input in the same group.
ACT_ORDER = {f"{LAYER}.{name}.g_idx": np.arange(64, dtype=np.int32) % 2 for name in PARTS["qkv"]}
BLOCKS = {"quant_method": "fp8", "quant_algo": None, "weight_block_size": [32, 32]}


def block_scales(name: str, *shape: int) -> dict[str, np.ndarray | None]:
    """Replace the scale of an FP8 layer by those of blocks of 32 x 32."""
    blocks = tuple(size // 32 for size in shape)
    scales = np.random.default_rng(0).uniform(0.05, 0.1, blocks).astype(np.float32)
    return {f"{name}.weight_scale": None, f"{name}.weight_scale_inv": scales}


SHAPES = {"self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64)}
SHAPES |= {"self_attn.o_proj": (64, 64), "mlp.gate_proj": (96, 64), "mlp.up_proj": (96, 64)}
SHAPES |= {"mlp.down_proj": (64, 96)}
ALL_BLOCKS = {
    key: value
    for name, shape in SHAPES.items()
    for key, value in block_scales(f"{LAYER}.{name}", *shape).items()
}


def dequantised(engine, matrix) -> np.ndarray:
    """Compute a matrix [K,N] of `llm/fused.json`."""
    contents = (engine / "llm" / matrix.file).read_bytes()

    def read(weight, dtype=np.uint8):
        return np.frombuffer(contents, dtype, weight.size, weight.offset).reshape(weight.shape[0], -1)

    if matrix.float8:
        scales = read(matrix.scales, np.float32).T
        return read(matrix.values, ml_dtypes.float8_e4m3fn).T * np.repeat(scales, matrix.group, axis=0)
    bits, scales = matrix.bits, read(matrix.scales, np.float16).T
    values, zeros = unpacked(read(matrix.values), bits).T.astype(float), np.full(scales.shape, 1 << bits - 1)
    if matrix.zero_points is not None:
        zeros = unpacked(read(matrix.zero_points), bits)[:, : len(scales)].T
    zeros, scales = (np.repeat(each, matrix.group, axis=0) for each in (zeros, scales))
    rows = (values - zeros) * scales
    if matrix.offsets is not None:
        rows += np.repeat(read(matrix.offsets, np.float16), matrix.group, axis=0)
    if matrix.order is None:
        return rows
    weight = np.empty_like(rows)
    weight[read(matrix.order, np.int64)[:, 0]] = rows
    return weight


@pytest.mark.parametrize(
    ("method", "options", "form"),
    [
        ("gptq", {}, Quantized(4, 32, zero_points=True)),
        ("gptq-8", {}, Quantized(8, 32, zero_points=True)),
        ("awq", {}, Quantized(4, 32, zero_points=True)),
        ("packed", {}, Quantized(4, 32)),
        ("fp8", {}, Quantized(8, 0, float8=True)),
        ("fp8", {"replaced": ALL_BLOCKS, **BLOCKS}, Quantized(8, 32, float8=True)),
        ("gptq", {"replaced": ACT_ORDER}, Quantized(4, 32, zero_points=True, ordered=True)),
    ],
    ids=["gptq", "gptq-8", "awq", "packed", "fp8", "fp8 in blocks", "act-order"],
)
def test_every_place_holds_the_checkpoints_weights(tmp_path, method, options, form):
    checkpoint = write_quantized_checkpoint(tmp_path / "checkpoint", method, **options)
    export(checkpoint, tmp_path / "engine", precision="fp16")
    model = FusedModel.load(tmp_path / "engine" / FUSED_FILE)
    weights = Weights(checkpoint, find_layout(read_section(checkpoint / "config.json")))
    for field, names in PARTS.items():
        assert getattr(model.layers[0], field) is None
        matrix = getattr(model.quantized[0], field)
        wanted = form if field == "qkv" else dataclasses.replace(form, ordered=False)
        assert Quantized(*matrix.form) == wanted
        parts = [weights.matrix(f"{LAYER}.{name}").dequantized() for name in names]
        expected = np.concatenate(parts, axis=1)
        np.testing.assert_allclose(dequantised(tmp_path / "engine", matrix), expected, rtol=1e-6)


@pytest.mark.parametrize("kind, form", [("Q4_1", (4, 32)), ("Q5_K", (8, 32))])
def test_the_blocks_of_a_gguf_file_keep_their_offsets(tmp_path, kind, form):
    """The reference is the arithmetic of llama.cpp's package `gguf`."""
    path = write_gguf(tmp_path / "model.gguf", "llama", kind)
    export(path, tmp_path / "engine", precision="fp16", max_input_len=16, max_kv_cache_capacity=32)
    model = FusedModel.load(tmp_path / "engine" / FUSED_FILE)
    matrix = model.quantized[0].down
    assert Quantized(*matrix.form) == Quantized(*form, offsets=True)
    (tensor,) = (each for each in gguf.GGUFReader(path).tensors if each.name == "blk.0.ffn_down.weight")
    expected = gguf.dequantize(tensor.data, tensor.tensor_type).T
    np.testing.assert_allclose(dequantised(tmp_path / "engine", matrix), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("tied", [True, False])
def test_a_rounded_model_in_16_bits_has_its_lm_head_in_8(tmp_path, tied):
    checkpoint = write_decoder_checkpoint(tmp_path / "c", "llama", tie_word_embeddings=tied, vocab_size=320)
    export(checkpoint, tmp_path / "engine", precision="fp16", quantize="int4", group_size=32)
    model = FusedModel.load(tmp_path / "engine" / FUSED_FILE)
    assert Quantized(*model.quantized_head.form) == Quantized(8, 32)
    assert (model.tied, model.lm_head) == (False, None)
    expected = Weights(checkpoint).read("model.embed_tokens.weight" if tied else "lm_head.weight").T
    found = dequantised(tmp_path / "engine", model.quantized_head)
    assert np.abs(found - expected).max() < np.abs(expected).max() / 200


def test_a_gguf_file_s_lm_head_keeps_its_blocks(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", "llama", "Q4_0")
    export(path, tmp_path / "engine", precision="fp16", max_input_len=16, max_kv_cache_capacity=32)
    model = FusedModel.load(tmp_path / "engine" / FUSED_FILE)
    (tensor,) = (each for each in gguf.GGUFReader(path).tensors if each.name == "token_embd.weight")
    expected = gguf.dequantize(tensor.data, tensor.tensor_type).T
    np.testing.assert_array_equal(dequantised(tmp_path / "engine", model.quantized_head), expected)


@pytest.mark.parametrize("options", [{"precision": "fp32"}, {"precision": "fp16", "lm_head_input": True}])
def test_an_lm_head_stays_as_it_is(tmp_path, options):
    checkpoint = write_decoder_checkpoint(tmp_path / "c", "llama", vocab_size=320)
    export(checkpoint, tmp_path / "engine", quantize="int4", group_size=32, **options)
    graph = onnx.load(tmp_path / "engine/llm/model.onnx", load_external_data=False).graph
    assert not any(each.name.startswith("lm_head.") for each in graph.initializer)


def test_a_form_without_kernels_is_a_problem_of_the_description(tmp_path):
    several = {f"{LAYER}.self_attn.q_proj.g_idx": ACT_ORDER[f"{LAYER}.self_attn.q_proj.g_idx"]}
    export(write_quantized_checkpoint(tmp_path / "c", "gptq", replaced=several), tmp_path, precision="fp16")
    model = FusedModel.load(tmp_path / FUSED_FILE)
    assert model.problem == f"the layers of {LAYER}.self_attn.qkv_proj are stored in different ways"
    assert model.layers == ()


def test_joined_matrices_of_4_and_8_bits_keep_their_weights():
    random = np.random.default_rng(0)

    def matrix(dtype, group, **optional):
        values = random.integers(-(1 << dtype.bitwidth - 1), 1 << dtype.bitwidth - 1, (96, 8), np.int8)
        scales = random.standard_normal((96 // group, 8)).astype(np.float32)
        sizes = {"fan_in": 96, "fan_out": 8, "dtype": dtype, "group": group}
        return QuantizedMatrix(**sizes, values=lambda: values, scales=lambda: scales, **optional)

    offsets = random.standard_normal((3, 8)).astype(np.float32)
    zeros = random.integers(-8, 8, (1, 8), np.int8)
    parts = [matrix(INT4, 32, offsets=lambda: offsets), matrix(INT8, 16), matrix(INT4, 96, zeros=zeros)]
    joined = join(parts)
    assert (joined.dtype, joined.group) == (INT8, 16)
    expected = np.concatenate([part.dequantized() for part in parts], axis=1)
    np.testing.assert_array_equal(joined.dequantized(), expected)


@pytest.mark.parametrize("groups", [1, 3])
def test_onnxruntimes_product_with_fp8_is_that_with_the_weights(tmp_path, groups):
    random = np.random.default_rng(0)
    values = random.standard_normal((96, 40)).astype(ml_dtypes.float8_e4m3fn)
    scales = random.uniform(0.5, 1.5, (groups, 40)).astype(np.float32)
    order = random.permutation(96)
    matrix = QuantizedMatrix(
        fan_in=96,
        fan_out=40,
        dtype=FLOAT8,
        group=96 // groups,
        values=lambda: values,
        scales=lambda: scales,
        order=order,
    )
    graph = GraphBuilder("product", "fp32")
    x = random.standard_normal((5, 96)).astype(np.float32)
    y = quantized_product(graph, "w", graph.input("x", graph.dtype, [5, 96]), matrix, zero_points=True)
    graph.output(y, "y", graph.dtype, [5, 40])
    graph.save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"x": x})[0], x @ matrix.dequantized(), rtol=1e-4, atol=1e-4)


def plain(name: str, *shape: int) -> dict[str, np.ndarray | None]:
    """Replace a packed layer by one in fp16."""
    stored = (f"{name}.weight_packed", f"{name}.weight_scale", f"{name}.weight_shape")
    return dict.fromkeys(stored) | {f"{name}.weight": np.zeros(shape, np.float16)}


def test_joined_layers_of_different_forms_are_a_problem(tmp_path):
    replaced = plain(f"{LAYER}.mlp.up_proj", 96, 64)
    write_quantized_checkpoint(tmp_path / "c", "packed", replaced=replaced)
    export(tmp_path / "c", tmp_path, precision="fp16")
    problem = FusedModel.load(tmp_path / FUSED_FILE).problem
    assert problem == f"the layers of {LAYER}.mlp.gate_up_proj are stored in different ways"


def test_layers_of_different_forms_are_kinds_of_their_own(monkeypatch, tmp_path):
    monkeypatch.setitem(quantized_checkpoint.SIZES, "num_hidden_layers", 2)
    replaced = plain("model.layers.0.mlp.down_proj", 64, 96)
    write_quantized_checkpoint(tmp_path / "c", "packed", replaced=replaced)
    config = export(tmp_path / "c", tmp_path, precision="fp16")
    shape = fused_shape(config, FusedModel.load(tmp_path / FUSED_FILE), 1, adapts=False)
    first, second = shape.of_each_kind()
    assert shape.layer_kinds == (0, 1)
    assert first.form("down") is None
    assert second.form("down") == Quantized(4, 32)
    assert first.form("qkv") == second.form("qkv") == Quantized(4, 32)


def test_the_first_kind_of_layers_is_quantised_if_one_is(monkeypatch, tmp_path):
    """What computes prompts is chosen by the first kind."""
    monkeypatch.setitem(quantized_checkpoint.SIZES, "num_hidden_layers", 2)
    replaced = {
        key: value
        for name, shape in SHAPES.items()
        for key, value in plain(f"{LAYER}.{name}", *shape).items()
    }
    write_quantized_checkpoint(tmp_path / "c", "packed", replaced=replaced)
    config = export(tmp_path / "c", tmp_path, precision="fp16")
    shape = fused_shape(config, FusedModel.load(tmp_path / FUSED_FILE), 1, adapts=False)
    assert shape.layer_kinds == (1, 0)
    assert shape.quantized
    assert shape.other_kinds == ((),)


def test_more_kinds_of_layers_than_the_kernels_take_are_refused():
    forms = tuple((("o", Quantized(bits, 32 << i)),) for bits in (4, 8) for i in range(3))
    shape = changed(quantized=forms[0], other_kinds=forms[1:5], layer_kinds=(0, 1, 2, 3, 4), layers=5)
    assert shape.unsupported() == "layers are quantised in 5 different ways, more than 4"


def test_the_graphs_for_cuda_share_one_copy_of_the_weights(tmp_path):
    checkpoint = write_decoder_checkpoint(tmp_path / "checkpoint", "llama")
    head = write_random_head(tmp_path / "head", base_config(checkpoint))
    export(checkpoint, tmp_path / "engine", precision="fp16", quantize="int4", group_size=32, draft=head)
    for name in ("model", "verify", "verify.chain"):
        graph = onnx.load(tmp_path / "engine/llm" / f"{name}.cuda.onnx", load_external_data=False).graph
        files = {
            entry.value
            for each in graph.initializer
            if each.name.endswith((".packed", ".packed_scale"))
            for entry in each.external_data
            if entry.key == "location"
        }
        assert files == {"model.cuda.onnx.data"}
    assert not list((tmp_path / "engine/llm").glob("verify*.cuda.onnx.data"))
