# SPDX-License-Identifier: Apache-2.0
"""Tuning: a table from kinds of steps to the sizes of their kernels.

The tables are `tuned/<architecture>.json`. `python -m benchmarks.tune_fused` measures a GPU and writes one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from edgellm_ros.engine_directory.schema import from_dict, read_json, to_dict
from edgellm_ros.fused.plan.config import StepConfig
from edgellm_ros.fused.plan.shape import MOST_ROWS, FusedShape

TABLES = Path(__file__).with_name("tuned")
DENSE, ADAPTED, QUANTIZED = WEIGHTS = ("dense", "adapted", "quantized")


@dataclass(frozen=True)
class TunedStep:
    """Sizes of steps with these weights, up to a number of rows and a hidden size."""

    weights: str  # of WEIGHTS: plain, plain with LoRA adapters, quantised with or without adapters
    rows: int
    hidden: int | None  # None = any
    config: StepConfig

    def __post_init__(self) -> None:
        if self.weights not in WEIGHTS:
            raise ValueError(f"weights must be one of {', '.join(WEIGHTS)}, got {self.weights!r}")

    def fits(self, weights: str, rows: int, hidden: int) -> bool:
        """Return whether the row is for such a step."""
        return self.weights == weights and rows <= self.rows and hidden <= (self.hidden or hidden)


@dataclass(frozen=True)
class Tuning:
    """The table of one GPU architecture.

    Of the rows that fit a step the first one counts.
    """

    gpu: str  # that it was measured on
    early_start: bool  # launch kernels early (PDL), where the GPU supports it
    trigger_first: bool  # let the dependent kernel launch when a kernel's CTAs start, not after pdl_wait
    fusion_threads: int  # per CTA of the fusion of a draft head's states
    steps: tuple[TunedStep, ...]

    def config(self, shape: FusedShape, rows: int, adapted: bool = False) -> StepConfig:
        """Return the sizes for steps of up to so many rows.

        ValueError if the table has none.
        """
        weights = QUANTIZED if shape.quantized else ADAPTED if adapted else DENSE
        for step in self.steps:
            if step.fits(weights, rows, shape.hidden):
                return step.config
        raise ValueError(f"no tuning of {weights} weights for {rows} rows and hidden size {shape.hidden}")

    def changed(self, change: Callable[[TunedStep], dict[str, Any]]) -> Tuning:
        """Return the table with other sizes.

        change: from a row to those of its sizes that are others.
        """
        steps = (replace(step, config=replace(step.config, **change(step))) for step in self.steps)
        return replace(self, steps=tuple(steps))


@lru_cache
def load_tuning(arch: str) -> Tuning:
    """Load the table of an architecture, such as "sm_90", or the nearest."""
    return read_tuning(nearest_table(arch))


def nearest_table(arch: str) -> Path:
    """Return the table of an architecture, or of the nearest one.

    That is the newest older one, else the oldest.
    """
    tables = sorted((_number(path.stem), path) for path in TABLES.glob("sm_*.json"))
    older = [path for number, path in tables if number <= _number(arch)]
    return older[-1] if older else tables[0][1]


def read_tuning(path: Path) -> Tuning:
    """Read a table. ValueError names file, key and value of what is wrong.

    A row of the file has the sizes in which it differs from `common`.
    """
    data = read_json(path)
    common = data.pop("common", {})
    rows = data.get("steps")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path}: steps: expected a list of objects")
    limits = "weights", "rows", "hidden"
    data["steps"] = [
        {name: row.get(name) for name in limits}
        | {"config": common | {name: value for name, value in row.items() if name not in limits}}
        for row in rows
    ]
    tuning = from_dict(Tuning, data, str(path))
    for weights in WEIGHTS:
        if not any(
            step.weights == weights and step.rows >= MOST_ROWS and not step.hidden for step in tuning.steps
        ):
            raise ValueError(
                f"{path}: steps: expected a row of {weights} weights with rows {MOST_ROWS}, hidden null"
            )
    return tuning


def write_tuning(path: Path, tuning: Tuning) -> None:
    """Write a table as `read_tuning` reads it, one row per line.

    `common` has the most frequent value of each size.
    """
    data = to_dict(tuning)
    rows = data.pop("steps")
    configs = [row.pop("config") for row in rows]
    common = {name: _most_frequent([config[name] for config in configs]) for name in configs[0]}
    for row, config in zip(rows, configs, strict=True):
        row |= {name: value for name, value in config.items() if value != common[name]}
    head = json.dumps(data | {"common": common}, indent=2).removesuffix("\n}")
    steps = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    path.write_text(f'{head},\n  "steps": [\n{steps}\n  ]\n}}\n', encoding="utf-8")


def _most_frequent(values: list[Any]) -> Any:
    return json.loads(Counter(map(json.dumps, values)).most_common(1)[0][0])  # True is no 1 here


def _number(arch: str) -> int:
    """Return 90 for "sm_90"."""
    return int("".join(filter(str.isdigit, arch)))
