# SPDX-License-Identifier: Apache-2.0
"""Weights that an export leaves out are told."""

from __future__ import annotations

import dataclasses
import json
import logging

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgellm_ros.builder import ExportOptions, check, export, render_check
from edgellm_ros.builder.exporter.plan import plan_export
from fixtures.decoder_checkpoint import write_decoder_checkpoint
from fixtures.hybrid_checkpoints import write_nemotron_h_checkpoint, write_qwen3_5_checkpoint
from fixtures.internvl_checkpoint import write_internvl_checkpoint
from fixtures.mtp_checkpoints import WRITERS as MTP_WRITERS
from fixtures.quantized_checkpoint import METHODS, write_quantized_checkpoint
from fixtures.qwen2_5_vl_checkpoint import write_qwen2_5_vl_checkpoint
from fixtures.qwen3_vl_checkpoint import write_qwen3_vl_checkpoint
from fixtures.smolvla_checkpoint import write_smolvla
from fixtures.tiny_checkpoint import write_tiny_checkpoint

LIMITS = {"max_input_len": 48, "max_kv_cache_capacity": 64}
WRITERS = [
    write_tiny_checkpoint,
    write_nemotron_h_checkpoint,
    write_qwen3_5_checkpoint,
    write_internvl_checkpoint,
    write_qwen2_5_vl_checkpoint,
    write_qwen3_vl_checkpoint,
]


def add(checkpoint, **tensors):
    path = checkpoint / "model.safetensors"
    save_file(load_file(path) | {name.replace("__", "."): tensor for name, tensor in tensors.items()}, path)
    return checkpoint


@pytest.fixture
def checkpoint(tmp_path):
    return write_decoder_checkpoint(tmp_path / "checkpoint", "qwen3")


@pytest.mark.parametrize("write", WRITERS)
def test_an_export_reads_all_weights_of_its_family(tmp_path, write):
    assert check(write(tmp_path / "checkpoint"), ExportOptions(**LIMITS)).unread == ()


@pytest.mark.parametrize("method", METHODS)
def test_all_tensors_of_quantised_layers_are_read(tmp_path, method):
    checkpoint = write_quantized_checkpoint(tmp_path / "checkpoint", method)
    assert check(checkpoint, ExportOptions(**LIMITS)).unread == ()


def test_all_layers_that_are_rounded_are_read(checkpoint):
    assert check(checkpoint, ExportOptions(**LIMITS, quantize="int8", group_size=32)).unread == ()


@pytest.mark.parametrize("write", MTP_WRITERS.values(), ids=MTP_WRITERS)
def test_all_tensors_of_an_mtp_head_are_read(tmp_path, write):
    assert check(write(tmp_path / "checkpoint"), ExportOptions(**LIMITS)).unread == ()


def test_an_mtp_head_that_is_left_out_is_told(tmp_path, caplog):
    checkpoint = MTP_WRITERS["qwen3_5"](tmp_path / "checkpoint")
    options = {**LIMITS, "with_draft": False}
    (unread,) = check(checkpoint, ExportOptions(**options)).unread
    with caplog.at_level(logging.WARNING):
        config = export(checkpoint, tmp_path / "engine", **options)
    assert config.draft is None
    assert caplog.messages == [f"{checkpoint}: {unread.bytes} bytes of weights are not read: {unread}"]
    assert (unread.name, unread.tensors) == ("mtp.*", 15)


def test_modules_are_listed_with_their_bytes_the_largest_first(checkpoint):
    add(
        checkpoint,
        talker__a__weight=np.zeros((4, 5), np.float32),
        talker__b__weight=np.zeros((5,), np.float16),
        model__layers__0__self_attn__rotary_emb__inv_freq=np.zeros(8, np.float32),
        model__layers__1__self_attn__rotary_emb__inv_freq=np.zeros(8, np.float32),
        model__layers__1__self_attn__q_proj__lora=np.zeros(3, np.float32),
    )
    report = check(checkpoint, ExportOptions(**LIMITS))
    assert [(each.name, each.tensors, each.bytes) for each in report.unread] == [
        ("talker.*", 2, 90),
        ("model.layers.*.self_attn.rotary_emb.*", 2, 64),
        ("model.layers.1.self_attn.q_proj.lora", 1, 12),
    ]
    told = "left out    166 bytes of weights are not read: talker.* (2 tensors, 90 bytes), model.layers.*."
    assert told in render_check(report)
    assert json.loads(json.dumps(dataclasses.asdict(report)))["unread"][0]["name"] == "talker.*"


def test_a_policy_tells_what_its_last_layer_does_not_need(tmp_path):
    unread = plan_export(write_smolvla(tmp_path / "checkpoint"), ExportOptions()).unread
    layer = "model.vlm_with_expert.vlm.model.text_model.layers.2"
    assert f"{layer}.mlp.*" in [each.name for each in unread]
