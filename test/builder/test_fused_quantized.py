# SPDX-License-Identifier: Apache-2.0
"""Quantised weights for the fused kernels: in `llm/model.cuda.onnx` and `llm/fused.json`."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from doubles.quantized_weights import unpacked
from edgellm_ros.builder import export
from edgellm_ros.builder.checkpoint import Weights
from edgellm_ros.builder.checkpoint_config import read_section
from edgellm_ros.builder.quantization.layouts import find_layout
from edgellm_ros.engine_directory.fused_model import FUSED_FILE, FusedModel
from fixtures import quantized_checkpoint
from fixtures.decoder_checkpoint import write_decoder_checkpoint
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


def dequantised(engine, matrix) -> np.ndarray:
    """Compute a matrix [K,N] of `llm/fused.json`."""

    contents = (engine / "llm" / matrix.file).read_bytes()

    def read(weight, dtype=np.uint8):
        return np.frombuffer(contents, dtype, weight.size, weight.offset).reshape(weight.shape[0], -1)

    bits, scales = matrix.bits, read(matrix.scales, np.float16).T
    values, zeros = unpacked(read(matrix.values), bits).T.astype(float), np.full(scales.shape, 1 << bits - 1)
    if matrix.zero_points is not None:
        zeros = unpacked(read(matrix.zero_points), bits)[:, : len(scales)].T
    zeros, scales = (np.repeat(each, matrix.group, axis=0) for each in (zeros, scales))
    return (values - zeros) * scales


@pytest.mark.parametrize(("method", "bits"), [("gptq", 4), ("gptq-8", 8), ("awq", 4), ("packed", 4)])
def test_every_place_holds_the_checkpoints_weights(tmp_path, method, bits):
    checkpoint = write_quantized_checkpoint(tmp_path / "checkpoint", method)
    export(checkpoint, tmp_path / "engine", precision="fp16")
    model = FusedModel.load(tmp_path / "engine" / FUSED_FILE)
    weights = Weights(checkpoint, find_layout(read_section(checkpoint / "config.json")))
    for field, names in PARTS.items():
        assert getattr(model.layers[0], field) is None
        matrix = getattr(model.quantized[0], field)
        assert matrix.form == (bits, 32, method != "packed")
        parts = [weights.matrix(f"{LAYER}.{name}").dequantized() for name in names]
        expected = np.concatenate(parts, axis=1)
        np.testing.assert_allclose(dequantised(tmp_path / "engine", matrix), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("method", "options", "problem"),
    [
        ("gptq", {"replaced": ACT_ORDER}, "the inputs of model.layers.0.self_attn.qkv_proj are sorted by"),
        ("fp8", {}, "model.layers.0.self_attn.qkv_proj is stored as FLOAT8E4M3FN"),
    ],
)
def test_a_form_without_kernels_is_a_problem_of_the_description(tmp_path, method, options, problem):
    export(write_quantized_checkpoint(tmp_path / "c", method, **options), tmp_path, precision="fp16")
    model = FusedModel.load(tmp_path / FUSED_FILE)
    assert model.problem.startswith(problem)
    assert model.layers == ()


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


def test_layers_of_different_forms_are_a_problem(monkeypatch, tmp_path):
    monkeypatch.setitem(quantized_checkpoint.SIZES, "num_hidden_layers", 2)
    replaced = plain("model.layers.1.mlp.down_proj", 64, 96)
    write_quantized_checkpoint(tmp_path / "c", "packed", replaced=replaced)
    export(tmp_path / "c", tmp_path, precision="fp16")
    problem = FusedModel.load(tmp_path / FUSED_FILE).problem
    assert problem == "down is quantised in 2 different ways in different layers"


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
