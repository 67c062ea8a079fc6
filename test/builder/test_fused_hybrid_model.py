# SPDX-License-Identifier: Apache-2.0
"""`llm/fused.json` of hybrid models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from edgellm_ros.builder import export
from edgellm_ros.fused.description.decoder import FUSED_FILE, FusedModel
from edgellm_ros.fused.plan.quantized import Quantized
from fixtures.hybrid_checkpoints import write_nemotron_h_checkpoint, write_qwen3_5_checkpoint

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
QWEN = {
    **SIZES,
    "layer_types": ["linear_attention", "full_attention"],
    "num_hidden_layers": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "attention_bias": False,
}
NEMOTRON = {
    **SIZES,
    "hybrid_override_pattern": "M-M*",
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 32,
    "use_bias": False,
    "use_conv_bias": True,
    "mlp_bias": False,
}
DELTA_NET, MAMBA2 = "model.layers.0.linear_attn", "backbone.layers.0.mixer"
MATRICES = {"in_proj", "out_proj"}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """The tensors of a Qwen3.5, and its engine."""
    root = tmp_path_factory.mktemp("qwen")
    return exported(write_qwen3_5_checkpoint(root / "c", **QWEN), root / "engine")


@pytest.fixture(scope="module")
def nemotron(tmp_path_factory):
    """The tensors of a Nemotron-H, and its engine."""
    root = tmp_path_factory.mktemp("nemotron")
    return exported(write_nemotron_h_checkpoint(root / "c", **NEMOTRON), root / "engine")


def exported(checkpoint: Path, engine: Path, **options) -> tuple[dict[str, np.ndarray], Path]:
    export(checkpoint, engine, precision="fp16", **options)
    return load_file(checkpoint / "model.safetensors"), engine


def described(engine: Path) -> FusedModel:
    return FusedModel.load(engine / FUSED_FILE)


def stored(engine: Path, part: object) -> dict[str, np.ndarray]:
    """Read the weights of a layer or a mixer at their places, by field."""
    contents, arrays = (engine / "llm" / described(engine).file).read_bytes(), {}
    for field, weight in vars(part).items():
        if hasattr(weight, "offset"):
            dtype = np.float32 if weight.fp32 else np.float16
            arrays[field] = np.frombuffer(contents, dtype, weight.size, weight.offset).reshape(weight.shape)
    return arrays


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], fp32: set[str]) -> None:
    """Compare weights; those of these names are in fp32."""
    assert set(found) == set(expected)
    for name, values in expected.items():
        dtype = np.float32 if name in fp32 else np.float16
        assert found[name].dtype == dtype, name
        np.testing.assert_allclose(found[name], values.astype(dtype), rtol=1e-6, err_msg=name)


def test_a_delta_nets_places_hold_the_checkpoints_weights(qwen):
    tensors, engine = qwen
    projections = [tensors[f"{DELTA_NET}.in_proj_{part}.weight"].T for part in ("qkv", "z", "b", "a")]
    expected = {
        "in_proj": np.concatenate(projections, axis=1),
        "out_proj": tensors[f"{DELTA_NET}.out_proj.weight"].T,
        "taps": tensors[f"{DELTA_NET}.conv1d.weight"][:, 0].T,
        "decay": -np.exp(tensors[f"{DELTA_NET}.A_log"]),
        "dt_bias": tensors[f"{DELTA_NET}.dt_bias"],
        "mixer_norm": tensors[f"{DELTA_NET}.norm.weight"],
    }
    found = stored(engine, described(engine).layers[0].mixer)
    assert_equal(found, expected, set(expected) - MATRICES)


def test_mamba2s_places_hold_the_checkpoints_weights(nemotron):
    tensors, engine = nemotron
    expected = {
        "in_proj": tensors[f"{MAMBA2}.in_proj.weight"].T,
        "out_proj": tensors[f"{MAMBA2}.out_proj.weight"].T,
        "taps": tensors[f"{MAMBA2}.conv1d.weight"][:, 0].T,
        "conv_bias": tensors[f"{MAMBA2}.conv1d.bias"],
        "decay": -np.exp(tensors[f"{MAMBA2}.A_log"]),
        "dt_bias": tensors[f"{MAMBA2}.dt_bias"],
        "skip": tensors[f"{MAMBA2}.D"],
        "mixer_norm": tensors[f"{MAMBA2}.norm.weight"],
    }
    found = stored(engine, described(engine).layers[0].mixer)
    assert_equal(found, expected, set(expected) - MATRICES)


def test_gates_of_attention_are_beside_their_queries(qwen):
    tensors, engine = qwen
    parts = [tensors[f"model.layers.1.self_attn.{part}_proj.weight"].T for part in "qkv"]
    found = stored(engine, described(engine).layers[1])
    np.testing.assert_array_equal(found["qkv"], np.concatenate(parts, axis=1).astype(np.float16))
    assert found["qkv"].shape[1] == (2 * QWEN["num_attention_heads"] + 2) * QWEN["head_dim"]


def test_a_layer_of_one_block_has_the_weights_of_that_block(nemotron):
    tensors, engine = nemotron
    layers = described(engine).layers
    assert [layer.mixer is not None for layer in layers] == [True, False, True, False]
    assert [layer.has_attention for layer in layers] == [False, False, False, True]
    assert [layer.gate_up is not None for layer in layers] == [False, True, False, False]
    expected = {
        "post_norm": tensors["backbone.layers.1.norm.weight"],
        "gate_up": tensors["backbone.layers.1.mixer.up_proj.weight"].T,
        "down": tensors["backbone.layers.1.mixer.down_proj.weight"].T,
    }
    assert_equal(stored(engine, layers[1]), expected, set())
    assert set(stored(engine, layers[3])) == {"input_norm", "qkv", "o"}


@pytest.mark.parametrize(
    ("name", "values"),
    [("qwen", (True, True, "silu", 0.0)), ("nemotron", (False, False, "relu2", pytest.approx(0.001)))],
)
def test_values_are_those_of_the_family(request, name, values):
    model = described(request.getfixturevalue(name)[1])
    assert (model.attention_gate, model.rope, model.activation, model.time_step_min) == values


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"use_bias": True}, id="biases of Mamba2"),
        pytest.param({"hybrid_override_pattern": "-M*"}, id="the first layer has no mixer"),
        pytest.param({"hybrid_override_pattern": "M*M"}, id="no feed-forward block"),
    ],
)
def test_a_hybrid_with_blocks_that_the_kernels_lack_has_no_description(tmp_path, changes):
    checkpoint = write_nemotron_h_checkpoint(tmp_path / "c", **NEMOTRON | changes)
    _, engine = exported(checkpoint, tmp_path / "engine")
    assert not (engine / FUSED_FILE).exists()


def test_every_matrix_of_a_quantised_hybrid_has_a_place(tmp_path):
    checkpoint = write_nemotron_h_checkpoint(tmp_path / "c", **NEMOTRON)
    _, engine = exported(checkpoint, tmp_path / "engine", quantize="int4", group_size=32)
    model = described(engine)
    names = [{name for name, _ in matrices.given()} for matrices in model.quantized]
    assert names == [MATRICES, {"gate_up", "down"}, MATRICES, {"qkv", "o"}]
    forms = {Quantized(*matrix.form) for each in model.quantized for _, matrix in each.given()}
    assert forms == {Quantized(4, 32)}
    assert (model.layers[0].mixer.in_proj, model.layers[0].mixer.out_proj) == (None, None)


def test_an_in_proj_that_is_quantised_in_part_is_a_problem_of_the_description(tmp_path):
    checkpoint = write_qwen3_5_checkpoint(tmp_path / "c", **QWEN)  # strengths and decays stay in 16 bits
    _, engine = exported(checkpoint, tmp_path / "engine", quantize="int4", group_size=32)
    problem = described(engine).problem
    assert problem == f"the layers of {DELTA_NET}.in_proj are stored in different ways"
