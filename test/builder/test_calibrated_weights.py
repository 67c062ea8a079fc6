# SPDX-License-Identifier: Apache-2.0
"""Scales of layers' inputs are folded without a trace.

Scales are chosen so that rounding costs less.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

from edgellm_ros.builder import export
from edgellm_ros.builder.calibration.folding import InputGroup
from edgellm_ros.builder.calibration.rounding import RoundedLayout
from edgellm_ros.builder.calibration.search import GroupScales
from edgellm_ros.builder.exporter.calibration import find_scales, plan_calibration
from edgellm_ros.builder.exporter.options import ExportOptions
from edgellm_ros.cli.quantization import calibration
from edgellm_ros.cli.quantization.calibration import layer_inputs
from edgellm_ros.cli.quantization.cost import logits
from edgellm_ros.cli.quantization.token_runs import TokenRun, text_inputs
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest
from fixtures.decoder_checkpoint import write_decoder_checkpoint
from fixtures.hybrid_checkpoints import write_nemotron_h_checkpoint, write_qwen3_5_checkpoint
from fixtures.internvl_checkpoint import write_internvl_checkpoint
from fixtures.outlier_checkpoint import write_outlier_checkpoint
from fixtures.tiny_adapter import write_adapter
from fixtures.tiny_checkpoint import write_tiny_checkpoint

OPTIONS = {"quantize": "int4", "group_size": 32, "max_lora_rank": 0}
PLAIN = {"max_lora_rank": 0, "with_draft": False}
FAMILIES = {
    "llama": lambda folder: write_decoder_checkpoint(folder, "llama"),
    "one query head for each value head": lambda folder: write_decoder_checkpoint(
        folder, "qwen2", num_key_value_heads=4
    ),
    "norms of heads": lambda folder: write_decoder_checkpoint(folder, "qwen3"),
    "Mamba2": write_nemotron_h_checkpoint,
    "gated delta net": write_qwen3_5_checkpoint,
    "beside encoders and an action expert": write_tiny_checkpoint,
    "beside a vision tower": write_internvl_checkpoint,
}


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def random_scales(checkpoint: Path, rng: np.random.Generator) -> list[GroupScales]:
    """Make scales from 0.2 to 5 for all groups."""
    plan = plan_calibration(checkpoint, ExportOptions(**OPTIONS))
    assert plan.groups
    found = []
    for group in plan.groups:
        size = plan.weights.shape(f"{group.layers[0]}.weight")[1]
        scales = np.exp(rng.uniform(-np.log(5), np.log(5), size)).astype(np.float32)
        scales = group.share(scales) if group.source is not None else np.ones_like(scales)
        found.append(GroupScales(group, 0.5, scales, 1.0))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_scales_of_inputs_leave_the_logits_of_weights_that_are_not_rounded(tmp_path, rng, family):
    checkpoint = FAMILIES[family](tmp_path / "checkpoint")
    scales = random_scales(checkpoint, rng)
    ids = [rng.integers(0, 200, 40).tolist()]
    found = []
    for name, given in (("plain", []), ("scaled", scales)):
        export(checkpoint, tmp_path / name, **PLAIN, scales=given)
        found.append(logits(tmp_path / name, ids)[0])
    assert np.abs(found[0]).max() > 0.1
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-5 * np.abs(found[0]).max())


@pytest.mark.slow
def test_each_rounded_layer_is_in_one_group_unscaled_behind_mixed_channels(tmp_path):
    for name, family in FAMILIES.items():
        plan = plan_calibration(family(tmp_path / name), ExportOptions(**OPTIONS))
        layers = [layer for group in plan.groups for layer in group.layers]
        modules = {tensor.removesuffix(".weight") for tensor in plan.weights}
        rounded = {module for module in modules if plan.layout.group_of(plan.weights.tensors, module)}
        assert rounded <= set(layers)
        assert len(layers) == len(set(layers)) > 4
        kept = {group.layers[0].rpartition(".")[2] for group in plan.groups if group.source is None}
        assert kept <= {"out_proj", *(["o_proj"] if "expert" in name else [])}, name


def test_query_heads_that_share_a_value_head_share_its_scales():
    group = InputGroup(("o",), "v", heads=(2, 3, 4))
    magnitudes = np.arange(24, dtype=np.float64)
    shared = group.share(magnitudes).reshape(2, 3, 4)
    np.testing.assert_array_equal(shared[0], [[4, 5, 6, 7]] * 3)
    np.testing.assert_array_equal(shared[1], [[16, 17, 18, 19]] * 3)


def test_weights_beyond_the_share_that_a_group_keeps_are_cut_off(tmp_path):
    weight = np.array([[1.0, -8.0, 3.0, 0.2] * 4, [7.0, 16.0, 2.0, -4.0] * 4], np.float32)
    layout = RoundedLayout("int4", 32, "model", np.dtype(np.float32))
    found = layout.rounded(weight, 16, np.array([[1.0], [1.0]], np.float32))
    np.testing.assert_allclose(found[0], [1, -8, 3, 0] * 4)  # steps of 1: from -8 to 7
    found = layout.rounded(weight, 16, np.array([[0.5], [1.0]], np.float32))
    np.testing.assert_allclose(found[0], [1, -4, 3, 0] * 4)  # steps of 0.5
    np.testing.assert_allclose(found[1], [8, 16, 2, -4] * 4)  # steps of -2: from 16 to -14


def runs_over(engine: Path, rng: np.random.Generator, count: int) -> list[TokenRun]:
    ids = [rng.integers(0, 200, 40).tolist() for _ in range(count)]
    return [TokenRun(text_inputs(engine, tokens), ()) for tokens in ids]


def test_few_of_many_tokens_are_kept_and_magnitudes_are_those_of_all(tmp_path, rng, monkeypatch):
    checkpoint = write_outlier_checkpoint(tmp_path / "checkpoint")
    plan = plan_calibration(checkpoint, ExportOptions(**OPTIONS))
    export(checkpoint, tmp_path / "plain", plan.options)
    runs = runs_over(tmp_path / "plain", rng, 3)
    every = layer_inputs(tmp_path / "plain", runs, plan)
    monkeypatch.setattr(calibration, "MAX_ROWS", 13)
    some = layer_inputs(tmp_path / "plain", runs, plan)
    kept = np.linspace(0, 3 * 40 - 1, 13).round().astype(int)
    for layer, inputs in every.items():
        np.testing.assert_array_equal(some[layer].rows, inputs.rows[kept])
        np.testing.assert_allclose(some[layer].magnitudes, np.abs(inputs.rows).mean(0), rtol=1e-5)


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    centred = expected - expected.mean(-1, keepdims=True)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(centred))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_outlier_channels_cost_less_than_half_of_plain_roundings_error_in_new_logits(tmp_path, rng, kind):
    checkpoint = write_outlier_checkpoint(tmp_path / "checkpoint")
    options = {**OPTIONS, "quantize": kind}
    plan = plan_calibration(checkpoint, ExportOptions(**options))
    export(checkpoint, tmp_path / "plain", plan.options)
    inputs = layer_inputs(tmp_path / "plain", runs_over(tmp_path / "plain", rng, 8), plan)
    scales = find_scales(plan, inputs)
    assert len(scales) == len(plan.groups) == 3 * 4
    assert all(each.error <= 1 for each in scales)
    export(checkpoint, tmp_path / "rounded", **options)
    export(checkpoint, tmp_path / "calibrated", **options, scales=scales)
    ids = [rng.integers(0, 200, 60).tolist() for _ in range(4)]
    plain, rounded, calibrated = (
        np.concatenate(logits(tmp_path / name, ids)) for name in ("plain", "rounded", "calibrated")
    )
    assert relative_error(calibrated, plain) < 0.5 * relative_error(rounded, plain)


def test_a_calibrated_engine_has_the_graphs_of_a_rounded_one(tmp_path, rng):
    checkpoint = write_outlier_checkpoint(tmp_path / "checkpoint")
    export(checkpoint, tmp_path / "rounded", **OPTIONS)
    export(checkpoint, tmp_path / "calibrated", **OPTIONS, scales=random_scales(checkpoint, rng))
    sizes = [
        {path.name: path.stat().st_size for path in (tmp_path / name / "llm").iterdir()}
        for name in ("rounded", "calibrated")
    ]
    assert sizes[0] == sizes[1]


@pytest.mark.slow
def test_an_adapter_changes_the_answers_of_a_scaled_engine_as_those_of_a_plain_one(tmp_path, rng):
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint")
    shutil.rmtree(checkpoint / "action_expert")  # so that o_proj is scaled too
    write_adapter(tmp_path / "adapter", checkpoint)
    request = LLMGenerationRequest("go to the red box", lora="adapter", logprobs=5)
    found = {}
    for name, scales in (("plain", []), ("scaled", random_scales(checkpoint, rng))):
        export(checkpoint, tmp_path / name, max_lora_rank=8, with_draft=False, scales=scales)
        with LLMInferenceRuntime(tmp_path / name, lora_dirs={"adapter": tmp_path / "adapter"}) as runtime:
            found[name] = runtime.handle_request(request)
            base = runtime.handle_request(dataclasses.replace(request, lora=""))
        assert base.token_ids != found[name].token_ids
    assert (tmp_path / "scaled" / "lora_scales.safetensors").is_file()
    assert not (tmp_path / "plain" / "lora_scales.safetensors").exists()
    assert found["scaled"].token_ids == found["plain"].token_ids
    values = [[each[1] for entries in answer.logprobs for each in entries] for answer in found.values()]
    np.testing.assert_allclose(values[1], values[0], atol=1e-4)
