# SPDX-License-Identifier: Apache-2.0
"""Policies whose large layers are in 8 bits: actions, files, refusals."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import onnx_ir as ir
import pytest

from edgellm_ros.builder import export
from edgellm_ros.builder.exporter.check import check
from edgellm_ros.builder.exporter.options import ExportOptions
from edgellm_ros.builder.exporter.plan import plan_export
from edgellm_ros.builder.report.inspection import inspect, render
from edgellm_ros.cli import main
from edgellm_ros.cli.quantization.policy_cost import (
    answer_actions,
    compare_actions,
    random_observations,
)
from fixtures.act_checkpoint import write_act
from fixtures.diffusion_checkpoint import write_diffusion
from fixtures.groot_checkpoint import ONE_ROBOT, write_groot
from fixtures.groot_n16_checkpoint import ONE_ROBOT_N16, write_groot_n16
from fixtures.pi_checkpoint import WIDER_SIZES, write_pi
from fixtures.policy_folders import write_policy_adapter
from fixtures.smolvla_checkpoint import CAMERAS, STATE, write_smolvla
from fixtures.xvla_checkpoint import write_xvla

pytestmark = pytest.mark.only_on("cpu", reason="the export is the same for every device")


WRITERS = {
    **{kind: partial(write_pi, kind=kind, sizes=sizes) for kind, sizes in WIDER_SIZES.items()},
    "smolvla": write_smolvla,
    "groot": partial(write_groot, shape=ONE_ROBOT),
    "groot_n16": partial(write_groot_n16, shape=ONE_ROBOT_N16),
    "xvla": write_xvla,
}
WAYS = {
    "quantize": {"quantize": "int8"},
    "cpu_int8": {"cpu_int8": True},
}


@pytest.fixture(scope="module", params=WRITERS)
def policy(request, tmp_path_factory):
    """A checkpoint, requests, and the actions of its engine in fp32."""
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = WRITERS[request.param](folder / "checkpoint")
    export(checkpoint, folder / "engine")
    requests = random_observations(folder / "engine", count=2)
    return checkpoint, requests, answer_actions(folder / "engine", requests)


@pytest.mark.parametrize("way", WAYS)
def test_actions_stay(policy, tmp_path, way):
    """Random pi0, GR00T and X-VLA amplify a rounding more than the others."""
    checkpoint, requests, expected = policy
    config = export(checkpoint, tmp_path, **WAYS[way])
    cost = compare_actions(expected, answer_actions(tmp_path, requests), expected)
    limit = 0.05 if config.policy.kind in ("pi0", "groot", "xvla") else 0.01
    assert 0 < cost.mean_difference < limit
    assert cost.largest_difference < 5 * limit


def test_only_products_of_large_layers_and_tables_are_rounded(policy):
    """All other floats of the standard graphs are those of the checkpoint."""
    checkpoint, *_ = policy
    plain, rounded = (plan_export(checkpoint, ExportOptions(quantize=each)).graphs for each in (None, "int8"))
    integers = 0
    for path, graph in plain.items():
        before, after = dict(graph.weights_by_name()), dict(rounded[path].weights_by_name())
        integers += sum(weight.dtype == ir.DataType.INT8 for weight in after.values())
        for name in before.keys() & after.keys():
            if after[name].dtype == ir.DataType.FLOAT and "embed_tokens" not in name:
                np.testing.assert_array_equal(after[name].numpy(), before[name].numpy())
    assert integers > 5


def test_the_graphs_for_cuda_compute_the_same(policy, tmp_path):
    """ONNX Runtime's CPU provider has their operators too."""
    checkpoint, requests, _ = policy
    export(checkpoint, tmp_path, quantize="int8")
    expected = answer_actions(tmp_path, requests)
    graphs = list(tmp_path.glob("*/*.cuda.onnx"))
    assert graphs
    for path in graphs:
        operators = {node.op_type for node in ir.load(path).graph}
        assert "MatMulNBits" in operators
        assert "DequantizeLinear" not in operators
        shutil.copy(path, path.with_name(path.name.replace("cuda", "cpu")))
    found = answer_actions(tmp_path, requests)
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.ptp(expected))


def test_the_table_of_words_is_in_8_bits_for_cuda(policy):
    checkpoint, *_ = policy
    graph = plan_export(checkpoint, ExportOptions(quantize="int8")).graphs["prefix/model.cuda.onnx"]
    tables = {name: weight for name, weight in graph.weights_by_name() if "embed_tokens" in name}
    assert sorted(name.rpartition(".")[2] for name in tables) == ["rows", "rows_scale"]
    assert max(tables.values(), key=lambda weight: weight.size).dtype == ir.DataType.INT8


def test_the_reports_have_the_bytes_of_the_integers(tmp_path):
    checkpoint, engine = WRITERS["pi05"](tmp_path / "checkpoint"), tmp_path / "engine"
    options = ExportOptions(quantize="int8", cpu_int8=True)
    report = check(checkpoint, options)
    export(checkpoint, engine, options)
    assert report.files == {path: (engine / path).stat().st_size for path in report.files}
    shown = render(inspect(engine))
    assert "int8" in shown
    assert "variant model.cuda.onnx" in shown
    assert "variant model.cpu.onnx" in shown


def test_a_merged_adapter_is_rounded(tmp_path):
    """Weights that are sums, in 8 bits."""
    checkpoint = write_smolvla(tmp_path / "base")
    (tmp_path / "adapter").mkdir()
    write_policy_adapter(checkpoint, tmp_path / "adapter")
    for name, options in (("plain", {}), ("rounded", {"quantize": "int8"})):
        export(tmp_path / "adapter", tmp_path / name, **options)
    requests = random_observations(tmp_path / "plain", count=1)
    before, after = (answer_actions(tmp_path / name, requests) for name in ("plain", "rounded"))
    assert 0 < compare_actions(before, after, before).mean_difference < 0.02


@pytest.mark.parametrize("write", [write_act, write_diffusion])
@pytest.mark.parametrize("way", ["quantize", "cpu_int8"])
def test_policies_of_convolutions_are_refused(tmp_path, write, way):
    message = rf"config\.json: type '\w+': convolutions are most of the work of this policy, and {way} rounds"
    with pytest.raises(ValueError, match=message) as error:
        plan_export(write(tmp_path), ExportOptions(**WAYS[way]))
    assert len(str(error.value).splitlines()) == 1


def test_4_bits_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"type 'smolvla': a policy, whose actions 'int4' would change too"):
        plan_export(write_smolvla(tmp_path), ExportOptions(quantize="int4"))


def test_integers_need_fp32_on_a_cpu(tmp_path):
    with pytest.raises(ValueError, match="cpu_int8 needs precision fp32, got 'fp16'"):
        plan_export(write_smolvla(tmp_path), ExportOptions(cpu_int8=True, precision="fp16"))


def run_export(folder: Path, capsys, *options: str) -> tuple[int, dict, str]:
    engine = folder / "engine"
    code = main(["export", str(folder / "checkpoint"), str(engine), "--json", *options])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else {}, err


def test_the_command_reports_what_it_cost(tmp_path, capsys):
    write_smolvla(tmp_path / "checkpoint")
    code, report, err = run_export(tmp_path, capsys, "--quantize", "int8")
    assert code == 0
    cost = report["quantization"]
    assert 0 < cost["mean_difference"] < cost["largest_difference"] < 0.1 < cost["other_noise"]
    assert (cost["chunks"], cost["actions"]) == (8, 48)
    assert "48 actions of 8 chunks: root mean square of differences" in err
    code, report, err = run_export(tmp_path, capsys, "--cpu-int8", "--no-report")
    assert (code, "quantization" in report, "root mean square" in err) == (0, False, False)


def test_the_report_takes_observations_of_the_robot(tmp_path, capsys):
    write_smolvla(tmp_path / "checkpoint")
    rng = np.random.default_rng(0)
    for name, size in CAMERAS.items():
        cv2.imwrite(str(tmp_path / f"{name}.png"), rng.integers(0, 256, (*size, 3), dtype=np.uint8))
    request = {"prompt": "go", "images": [f"{name}.png" for name in CAMERAS], "state": [0.5] * STATE}
    file = tmp_path / "requests.jsonl"
    file.write_text(f"{json.dumps(request)}\n" * 3)
    options = "--quantize", "int8", "--prompts", str(file)
    code, report, _ = run_export(tmp_path, capsys, *options)
    assert (code, report["quantization"]["chunks"]) == (0, 3)
    file.write_text(json.dumps(request | {"state": [0.5]}))
    code, _, err = run_export(tmp_path, capsys, *options)
    assert code != 0
    assert "requests.jsonl: line 1: state must have shape [3]" in err


def test_calibration_is_for_language_models(tmp_path, capsys):
    write_smolvla(tmp_path / "checkpoint")
    (tmp_path / "prompts.txt").write_text("go")
    options = "--quantize", "int8", "--calibrate", str(tmp_path / "prompts.txt")
    for more in ((), ("--check",)):
        code, _, err = run_export(tmp_path, capsys, *options, *more)
        assert code != 0
        assert "a policy, but --calibrate is for language models" in err
