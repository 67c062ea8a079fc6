# SPDX-License-Identifier: Apache-2.0
"""Scales of layers' inputs: folded without a trace, and chosen so that rounding costs less."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgellm_ros.builder import export
from edgellm_ros.builder.calibration import find_scales, plan_calibration
from edgellm_ros.builder.export_plan import ExportOptions
from edgellm_ros.builder.quantization.folding import InputGroup
from edgellm_ros.builder.quantization.search import GroupScales
from edgellm_ros.cli.calibration import layer_inputs
from edgellm_ros.cli.quantization_cost import logits
from edgellm_ros.cli.token_runs import TokenRun, text_inputs
from fixtures.decoder_checkpoint import write_decoder_checkpoint
from fixtures.hybrid_checkpoints import write_nemotron_h_checkpoint, write_qwen3_5_checkpoint
from fixtures.internvl_checkpoint import write_internvl_checkpoint
from fixtures.outlier_checkpoint import write_outlier_checkpoint
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
        found.append(GroupScales(group, 0.5, group.share(scales), 1.0))
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
def test_every_rounded_layer_but_the_outputs_of_recurrent_ones_is_in_one_group(tmp_path):
    for name, family in FAMILIES.items():
        plan = plan_calibration(family(tmp_path / name), ExportOptions(**OPTIONS))
        layers = [layer for group in plan.groups for layer in group.layers]
        modules = {tensor.removesuffix(".weight") for tensor in plan.weights}
        rounded = {module for module in modules if plan.layout.group_of(plan.weights.tensors, module)}
        left = {module.rpartition(".")[2] for module in rounded - set(layers)}
        assert left <= {"out_proj", *(["o_proj"] if "expert" in name else [])}, name
        assert len(layers) == len(set(layers)) > 4


def test_query_heads_that_share_a_value_head_share_its_scales():
    group = InputGroup(("o",), "v", heads=(2, 3, 4))
    magnitudes = np.arange(24, dtype=np.float64)
    shared = group.share(magnitudes).reshape(2, 3, 4)
    np.testing.assert_array_equal(shared[0], [[4, 5, 6, 7]] * 3)
    np.testing.assert_array_equal(shared[1], [[16, 17, 18, 19]] * 3)


def runs_over(engine: Path, rng: np.random.Generator, count: int) -> list[TokenRun]:
    ids = [rng.integers(0, 200, 40).tolist() for _ in range(count)]
    return [TokenRun(text_inputs(engine, tokens), ()) for tokens in ids]


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    centred = expected - expected.mean(-1, keepdims=True)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(centred))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_outlier_channels_cost_less_than_half_of_plain_roundings_error_in_new_logits(tmp_path, rng, kind):
    checkpoint = write_outlier_checkpoint(tmp_path / "checkpoint")
    options = {**OPTIONS, "quantize": kind}
    plan = plan_calibration(checkpoint, ExportOptions(**options))
    export(checkpoint, tmp_path / "plain", **plan.arguments)
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


def test_adapters_of_the_checkpoint_are_refused(tmp_path):
    checkpoint = write_outlier_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(ValueError, match="--max-lora-rank 0 exports an engine without adapters"):
        plan_calibration(checkpoint, ExportOptions(**{**OPTIONS, "max_lora_rank": 4}))
