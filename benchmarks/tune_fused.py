# SPDX-License-Identifier: Apache-2.0
"""Finds the sizes of the fused kernels for the GPU of this machine.

The result is a table as those in edgellm_ros/fused/plan/tuned/. Each row is improved for one shape, of its
largest hidden size and rows: one size after another takes other values, and a value stays if a step is
faster. Rows of adapters keep their sizes.

Measures
--------
- a step: all kernels of a decode step of a decoder with random weights, recorded as a graph, by events of the
  GPU around --steps launches of it. Two configurations take turns, --turns times; the figure is the median.

Conditions
----------
A decoder of --layers layers and an LM head of --vocab tokens, heads of 128, or with --engine that of an
engine directory; a KV cache of --context filled rows per sequence. What is not on the GPU (host, prompts,
sampling) is not measured.

Examples
--------
    python -m benchmarks.tune_fused
    python -m benchmarks.tune_fused --weights dense --rows 1,8 --out sm_87.json
    python -m benchmarks.tune_fused --engine engines/smollm2 --rows 4,8,16 --context 300
    pytest --device cuda test/kernels    # with the new table

Standard error has each change that made a step faster. Last JSON line: `table` (the file), `device_name`, and
`rows`: weights, rows and hidden size, the milliseconds of a step before and after, and the changed sizes.

"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common import finish, machine, numbers
from benchmarks.tuned_decoder import (
    ROWS_OF_ENGINES,
    Conditions,
    Decoder,
    engine_steps,
    shape_of,
    with_steps,
)
from edgellm_ros.engine.device import open_device
from edgellm_ros.engine_directory.config import EngineConfig
from edgellm_ros.fused.plan.config import StepConfig
from edgellm_ros.fused.plan.shape import FusedShape
from edgellm_ros.fused.plan.tuning import (
    ADAPTED,
    DENSE,
    QUANTIZED,
    TABLES,
    TunedStep,
    Tuning,
    load_tuning,
    write_tuning,
)
from edgellm_ros.fused.variants import Compile

Table = Callable[[StepConfig], Tuning]
FASTER = 0.99  # of the time before; less is noise
# Values that each size may take, in the order in which sizes are tried.
BOTH: dict[str, tuple[Any, ...]] = {
    "prepares_o": (False, True),
    "threads": (128, 256, 512),
    "stages": (2, 3, 4, 5, 7, 10, 13),
    "slots": (1, 2),
    "attention_threads": (128, 256),
    "split_rows": (32, 64, 128),
}
SIZES: dict[str, dict[str, tuple[Any, ...]]] = {
    DENSE: BOTH
    | {
        "tile": (64, 128, 256),
        "narrow_tile": (64, 128, 256),
        "head_tile": (64, 128),
        "prefetched": (1, 2, 3, None),
        "x_in_gmem": (False, True),
        "repeated_bytes": (1 << 20, 4 << 20, 16 << 20),
        "batch_attention": (False, True),
    },
    QUANTIZED: {"quantized_repeated_bytes": (2 << 20, 6 << 20, 24 << 20)}
    | BOTH
    | {
        "quantized_tile": (32, 64, 128, 256),
        "quantized_wide_tile": (64, 128, 256),
        "quantized_narrow_tile": (64, 128, 256),
        "quantized_early": (1, 2, 3),
    },
}


@dataclass(frozen=True)
class Found:
    """The result for one row of the table."""

    step: TunedStep
    config: StepConfig
    before_s: float
    after_s: float

    @property
    def changes(self) -> dict[str, Any]:
        """The sizes that changed."""
        old = vars(self.step.config)
        return {name: value for name, value in vars(self.config).items() if value != old[name]}


def improve(
    step: TunedStep,
    candidates: Mapping[str, tuple[Any, ...]],
    seconds: Callable[[StepConfig], float | None],
    turns: int,
    program: Callable[[StepConfig], object] = lambda config: config,
    prepare: Callable[[list[StepConfig]], None] = lambda configs: None,
) -> Found | None:
    """Let one size after another take other values.

    program: what tells the kernels of a configuration apart; one with the same kernels is not measured.
    prepare: called with configurations that `seconds` may be asked for next. None if the row itself cannot be
    measured.
    """
    best, first = step.config, seconds(step.config)
    if first is None:
        return None
    ratios = 1.0
    for name, values in candidates.items():
        prepare([replace(best, **{name: value}) for value in values])
        for value in values:
            other = replace(best, **{name: value})
            if program(other) == program(best) or seconds(other) is None:
                continue
            ratio = compared(best, other, seconds, turns)
            if ratio < FASTER:
                print(f"  {name} {getattr(best, name)} -> {value}: {ratio:.3f} of the time", file=sys.stderr)
                best, ratios = other, ratios * ratio
    return Found(step, best, first, first * ratios)


def compared(
    one: StepConfig, other: StepConfig, seconds: Callable[[StepConfig], float | None], turns: int
) -> float:
    """Return the time of the other configuration as a share of the one's.

    They are measured in turns.
    """
    pairs = [(seconds(one), seconds(other)) for _ in range(turns)]
    return statistics.median(after / before for before, after in pairs if before and after)


def tune(
    device: Any,
    tuning: Tuning,
    shapes: Mapping[TunedStep, FusedShape],
    conditions: Conditions,
    compile: Compile | None = None,
    trees: bool = False,
) -> Iterator[Found]:
    """Yield the results of rows of a table, or of rows to add.

    shapes: what each row is measured with; compile: None = for the device; trees: see `Decoder`.
    """
    for step, shape in shapes.items():
        print(f"{step.weights}, {step.rows} rows, hidden size {shape.hidden}", file=sys.stderr)
        decoder = Decoder(device, shape, conditions, compile, trees)

        def table(config: StepConfig, step: TunedStep = step) -> Tuning:
            return replace(tuning, steps=(replace(step, config=config), *tuning.steps))

        def seconds(config: StepConfig, decoder: Decoder = decoder, table: Table = table) -> float | None:
            return decoder.seconds(table(config))

        def program(config: StepConfig, decoder: Decoder = decoder, table: Table = table) -> object:
            return decoder.program(table(config))

        def prepare(configs: list[StepConfig], decoder: Decoder = decoder, table: Table = table) -> None:
            decoder.prepare([table(config) for config in configs])

        found = improve(step, SIZES[step.weights], seconds, conditions.turns, program, prepare)
        if found is None:
            print("  the GPU has no room for its kernels", file=sys.stderr)
        else:
            yield found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--weights", default=f"{DENSE},{QUANTIZED}", help="kinds of rows (default: %(default)s)"
    )
    parser.add_argument("--rows", type=numbers(int), default=[], help="only for so many (default: all)")
    parser.add_argument(
        "--engine",
        type=Path,
        help="add rows for the decoder of this engine directory, for verifications if it has a draft head, "
        f"else for batches (default of --rows: {','.join(map(str, ROWS_OF_ENGINES))})",
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--context", type=int, default=500)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--untied", action="store_true", help="an LM head with weights of its own, which `head_tile` is for"
    )
    parser.add_argument("--out", type=Path, help="the table (default: the package's, of this architecture)")
    args = parser.parse_args()
    device, begin = open_device(args.device), time.perf_counter()
    weights, rows = args.weights.split(","), args.rows
    tuning = load_tuning(device.arch)
    conditions = Conditions(
        args.layers, args.vocab, args.context, args.steps, turns=args.turns, tied=not args.untied
    )
    if args.engine:
        shapes = engine_steps(args.engine, tuning, tuple(rows) or ROWS_OF_ENGINES)
    else:
        wanted = (
            step for step in tuning.steps if step.weights in weights and (not rows or step.rows in rows)
        )
        shapes = {step: shape_of(step, conditions) for step in wanted if step.weights != ADAPTED}
    trees = args.engine is not None and EngineConfig.load(args.engine).draft is not None
    results = list(tune(device, tuning, shapes, conditions, trees=trees))
    tuning = with_steps(tuning, [replace(each.step, config=each.config) for each in results])
    out = args.out or TABLES / f"{device.arch}.json"
    write_tuning(out, replace(tuning, gpu=device.description.rpartition(" (")[0]))
    finish(
        "tune_fused",
        table=str(out),
        **machine(device),
        conditions=dataclasses.asdict(conditions),
        rows=[
            {
                "weights": each.step.weights,
                "rows": each.step.rows,
                "hidden": each.step.hidden,
                "before_ms": 1e3 * each.before_s,
                "after_ms": 1e3 * each.after_s,
                "changes": each.changes,
            }
            for each in results
        ],
        seconds=time.perf_counter() - begin,
    )


if __name__ == "__main__":
    main()
