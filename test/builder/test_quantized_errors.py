# SPDX-License-Identifier: Apache-2.0
"""Damaged and unsupported quantised checkpoints are refused.

The error is one line that names what is wrong.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgellm_ros.builder import export
from fixtures.changed_json import change
from fixtures.quantized_checkpoint import WEIGHTS, write_quantized_checkpoint

LAYER = "model.layers.0.mlp.up_proj"  # 64 inputs, 96 outputs, groups of 32


def refusal(checkpoint: Path) -> str:
    """Return the error of an export, which must write nothing."""
    engine = checkpoint.parent / "engine"
    with pytest.raises(ValueError, match=r"model\.safetensors|config\.json") as caught:
        export(checkpoint, engine)
    assert not engine.exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def damaged(folder: Path, method: str, **changed: np.ndarray | None) -> Path:
    """Write a checkpoint with other tensors of LAYER, by suffix; None leaves one out."""
    replaced = {f"{LAYER}.{suffix}": array for suffix, array in changed.items()}
    return write_quantized_checkpoint(folder / "checkpoint", method, replaced=replaced)


@pytest.mark.parametrize(
    ("method", "suffix", "beside"),
    [
        ("gptq", "scales", "qweight"),
        ("gptq", "qzeros", "qweight"),
        ("awq", "qzeros", "qweight"),
        ("packed", "weight_scale", "weight_packed"),
        ("packed", "weight_shape", "weight_packed"),
        ("fp8", "weight_scale", "weight"),
    ],
)
def test_a_missing_tensor_of_a_quantised_layer_is_named(tmp_path, method, suffix, beside):
    checkpoint = damaged(tmp_path, method, **{suffix: None})
    expected = f"model.safetensors: tensor '{LAYER}.{suffix}' is missing, but '{LAYER}."
    assert expected in refusal(checkpoint)


SETTINGS = [
    ("gptq", {"bits": 3}, "quantization_config: bits 3: supported: 4, 8"),
    ("gptq", {"bits": "4"}, "quantization_config: bits '4': supported: 4, 8"),
    ("gptq", {"group_size": 40}, "group_size 40: expected -1 or a divisor of the 96 inputs of"),
    ("gptq", {"group_size": 0}, "group_size 0: expected -1 or a divisor of the 96 inputs of"),
    ("gptq", {"group_size": None}, "group_size None: expected an integer"),
    ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin': supported: gptq, gptq_v2"),
    ("gptq", {"dynamic": {"+:.*down": {"bits": 8}}}, "settings of single layers are not supported"),
    ("awq", {"bits": 8}, "bits 8: supported: 4"),
    ("awq", {"version": "gemv"}, "version 'gemv': supported: gemm"),
    ("packed", {"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized': supported: pack-"),
    ("packed", {"config_groups": {}}, "config_groups {}: expected at least one group of layers"),
    ("packed", {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config"),
    ("fp8", {"quant_algo": "W4A16_AWQ"}, "quant_algo 'W4A16_AWQ': supported: FP8"),
]


@pytest.mark.parametrize(("method", "setting", "message"), SETTINGS)
def test_a_setting_that_is_not_supported_is_named(tmp_path, method, setting, message):
    checkpoint = write_quantized_checkpoint(tmp_path / "checkpoint", method, **setting)
    assert message in refusal(checkpoint)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [("num_bits", 3, "num_bits 3: supported: 4, 8"), ("strategy", "token", "strategy 'token': supported")],
)
def test_packed_weights_of_another_kind_are_refused(tmp_path, key, value, message):
    groups = {"group_0": {"targets": ["Linear"], "weights": {**WEIGHTS, key: value}}}
    checkpoint = write_quantized_checkpoint(tmp_path / "checkpoint", "packed", config_groups=groups)
    assert message in refusal(checkpoint)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_scales_of_other_groups_than_the_config_says_are_refused(tmp_path, method):
    checkpoint = damaged(tmp_path, method, scales=np.ones((4, 96), np.float16))  # groups of 16 in one layer
    assert f"{LAYER}.scales' has shape [4, 96], expected [2, 96] for groups of 32" in refusal(checkpoint)


def test_packed_scales_of_other_groups_than_the_config_says_are_refused(tmp_path):
    checkpoint = damaged(tmp_path, "packed", weight_scale=np.ones((96, 4), np.float16))
    assert "has shape [96, 4], expected [96, 1] or [96, 2] for groups of 32" in refusal(checkpoint)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (np.full(64, 2, np.int32), "g_idx' has group 2, expected 0 to 1"),
        (np.full(64, -5, np.int32), "g_idx' has group -5, expected 0 to 1"),
        (np.zeros(64, np.int32), "g_idx' has 64 inputs in group 0, expected 32"),
        (np.zeros(32, np.int32), "g_idx' has shape [32], expected [64]"),
        (np.zeros(64, np.float32), "g_idx' has dtype F32; supported: I32, I64"),
    ],
)
def test_an_order_of_inputs_that_fits_no_groups_is_refused(tmp_path, index, message):
    checkpoint = damaged(tmp_path, "gptq", g_idx=index)
    assert message in refusal(checkpoint)


def test_a_packed_weight_that_does_not_have_its_shape_is_refused(tmp_path):
    checkpoint = damaged(tmp_path, "packed", weight_shape=np.array([96, 128]))
    assert "has shape [96, 8], expected [96, 16] for weight_shape [96, 128] and 4 bits" in refusal(checkpoint)


def test_a_scale_that_fits_no_part_of_an_fp8_weight_is_refused(tmp_path):
    checkpoint = damaged(tmp_path, "fp8", weight_scale=np.ones(7, np.float32))
    assert "weight_scale' has shape [7], expected [1] or [96, 1]" in refusal(checkpoint)


def test_a_quantised_layer_of_another_size_than_the_config_says_is_refused(tmp_path):
    checkpoint = write_quantized_checkpoint(tmp_path / "checkpoint", "gptq")
    change(checkpoint / "config.json", ["intermediate_size"], 160)
    assert "proj.weight' has shape [96, 64], but by the config it is [160, 64]" in refusal(checkpoint)
