# SPDX-License-Identifier: Apache-2.0
"""`edgellm export --calibrate`: finds scales for rounding, from runs on prompts.

    requests -- engine in fp32 -- prompts and answers -- its graph with the inputs of linear layers as outputs
             -- find_scales -- export

All of it runs on the CPU. Memory is needed for the model in fp32, and for MAX_ROWS rows of the inputs of all
layers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgellm_ros.builder.calibration.search import GroupScales, LayerInputs
from edgellm_ros.builder.exporter.calibration import (
    CalibrationPlan,
    add_outputs,
    find_scales,
    plan_calibration,
)
from edgellm_ros.builder.exporter.export import export
from edgellm_ros.builder.exporter.options import ExportOptions
from edgellm_ros.cli.quantization.token_runs import TokenRun, record_runs, run_graph
from edgellm_ros.cli.requests.calibration_requests import read_requests, text_of
from edgellm_ros.engine.onnxruntime.session import open_session
from edgellm_ros.engine_directory.files import graph_path

MAX_ROWS = 512  # tokens whose inputs are kept for the search


@dataclass(frozen=True, eq=False)
class Calibration:
    """Scales for an export, and what they were found with."""

    requests: int
    text: str  # of the requests
    tokens: int
    scales: list[GroupScales]

    def __str__(self) -> str:
        error = np.mean([each.error for each in self.scales])
        return (
            f"{self.requests} requests, {self.tokens} tokens with their answers; scales of "
            f"{len(self.scales)} inputs; squared error of layers {error:.0%} of plain rounding's in the mean"
        )


def calibrate(
    checkpoint: str | Path, engine: str | Path, source: str | Path, options: ExportOptions
) -> Calibration:
    """Find scales for the export of a checkpoint with these options.

    source: file of prompts, or bag (`read_requests`). A temporary engine is written beside `engine`.
    """
    plan = plan_calibration(checkpoint, options)
    requests = read_requests(source, plan.config)
    parent = Path(engine).absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix=".calibration-") as folder:
        export(checkpoint, folder, plan.options)
        runs = record_runs(Path(folder), requests)
        inputs = layer_inputs(Path(folder), runs, plan)
    tokens = sum(run.tokens for run in runs)
    return Calibration(len(runs), text_of(requests.values()), tokens, find_scales(plan, inputs))


def layer_inputs(engine: Path, runs: Sequence[TokenRun], plan: CalibrationPlan) -> dict[str, LayerInputs]:
    """Collect the inputs of linear layers, by the first layer of each group."""
    path = engine / graph_path("llm")
    target = path.with_name("calibration.onnx")
    names = list(dict.fromkeys(plan.values.values()))
    add_outputs(path, names, target)
    session = open_session(target)
    total = sum(run.tokens for run in runs)
    kept = np.unique(np.linspace(0, total - 1, min(total, MAX_ROWS)).round().astype(int))
    rows: dict[str, list[np.ndarray]] = {name: [] for name in names}
    sums: dict[str, np.ndarray] = {}
    start = 0
    for run in runs:
        here = kept[(kept >= start) & (kept < start + run.tokens)] - start
        for name, values in zip(names, run_graph(session, engine, run.inputs, names), strict=True):
            values = values.reshape(run.tokens, -1)
            rows[name].append(values[here])
            sums[name] = sums.get(name, 0) + np.abs(values).sum(0, dtype=np.float64)
        start += run.tokens
    found = {name: LayerInputs(sums[name] / total, np.concatenate(rows[name])) for name in names}
    return {layer: found[name] for layer, name in plan.values.items()}
