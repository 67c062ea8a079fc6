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
A decoder of --layers layers and an LM head of --vocab tokens, heads of 128, a KV cache of --context filled
rows per sequence. What is not on the GPU (host, prompts, sampling) is not measured.

Examples
--------
    python -m benchmarks.tune_fused
    python -m benchmarks.tune_fused --weights dense --rows 1,8 --out sm_87.json
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

import numpy as np

from benchmarks.common import finish, machine, numbers
from edgellm_ros.engine.device import on_device, open_device
from edgellm_ros.engine.errors import EngineError
from edgellm_ros.engine.tensor import Tensor
from edgellm_ros.fused.decoder import FusedDecoder
from edgellm_ros.fused.plan.config import StepConfig
from edgellm_ros.fused.plan.decoder import FusedPlan
from edgellm_ros.fused.plan.quantized import ALIGNMENT, Quantized
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
from edgellm_ros.fused.weights import FusedLayerWeights, FusedWeights

LARGEST = 4096  # hidden size that stands for rows of the table without a limit
Table = Callable[[StepConfig], Tuning]
MATRICES = ("qkv", "o", "gate_up", "down")
FASTER = 0.99  # of the time before; less is noise
# Values that each size may take, in the order in which sizes are tried.
BOTH: dict[str, tuple[Any, ...]] = {
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
        "prepares_o": (False, True),
        "x_in_gmem": (False, True),
        "repeated_bytes": (1 << 20, 4 << 20, 16 << 20),
        "batch_attention": (False, True),
    },
    QUANTIZED: BOTH
    | {
        "quantized_tile": (32, 64, 128, 256),
        "quantized_wide_tile": (64, 128, 256),
        "quantized_narrow_tile": (64, 128, 256),
        "quantized_early": (1, 2, 3),
        "prepares_o": (False, True),
        "quantized_repeated_bytes": (2 << 20, 6 << 20, 24 << 20),
    },
}


@dataclass(frozen=True)
class Conditions:
    """What is measured, and how often."""

    layers: int
    vocab: int
    context: int
    steps: int
    turns: int
    tied: bool = True  # the LM head has the weights of the embedding


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


def shape_of(step: TunedStep, conditions: Conditions) -> FusedShape:
    """Return the shape that stands for a row of the table."""
    hidden = (step.hidden or LARGEST) // 64 * 64
    heads = max(1, hidden // 256 * 2)
    forms = tuple((name, Quantized(4, 128)) for name in MATRICES) if step.weights == QUANTIZED else ()
    return FusedShape(
        dtype="fp16",
        layers=conditions.layers,
        hidden=hidden,
        heads=heads,
        kv_heads=next(count for count in (8, 4, 2, 1) if heads % count == 0),
        head_dim=128,
        inner=hidden * 3,
        vocab=conditions.vocab,
        rotary_dim=128,
        capacity=conditions.context + 64,
        qk_norm=True,
        tied=conditions.tied,
        max_rows=step.rows,
        quantized=forms,
    )


class Decoder:
    """Random weights and inputs of a shape on a device, whose steps are measured."""

    def __init__(
        self, device: Any, shape: FusedShape, conditions: Conditions, compile: Compile | None = None
    ) -> None:
        self._device, self._shape, self._conditions = device, shape, conditions
        self._compile = compile
        self._random = np.random.default_rng(0)
        self._kept: list[Tensor] = []  # what the weights' addresses are of
        table = self._values(shape.vocab, shape.hidden)
        layers = tuple(self._layer() for _ in range(shape.layers))
        self._weights = FusedWeights(layers, self._values(shape.hidden).pointer, table.pointer)
        self._tensors = dict(self._inputs())

    def seconds(self, tuning: Tuning) -> float | None:
        """Return the time of a step; None if the device has no room for its kernels."""
        try:
            decoder = FusedDecoder(self._device, self._shape, self._weights, self._compile, tuning)
            if decoder.max_rows < self._shape.max_rows:
                return None
            graph = self._device.capture(lambda: decoder.run(self._tensors))
        except EngineError:
            return None
        for _ in range(3):
            graph.launch(self._device.stream)
        begin = self._device.mark()
        for _ in range(self._conditions.steps):
            graph.launch(self._device.stream)
        return self._device.mark().seconds_since(begin) / self._conditions.steps

    def program(self, tuning: Tuning) -> object:
        """Return what tells the kernels of a step apart; None if they do not fit."""
        shape, device = self._shape, self._device
        sizes = shape.max_rows, device.multiprocessors, device.most_shared_memory
        try:
            plan = FusedPlan(shape, *sizes, tuning)
        except EngineError:
            return None
        return plan.macros(), plan.shared, plan.blocks, plan.prepared

    def _values(self, *shape: int) -> Tensor:
        """Return random fp16 values; large tensors repeat 2**20 of them."""
        count = int(np.prod(shape))
        block = (self._random.standard_normal(min(count, 1 << 20)) * 0.02).astype(np.float16)
        tensor = on_device(self._device, np.resize(block, shape).view(np.uint16))
        self._kept.append(tensor)
        return tensor

    def _matrix(self, name: str, k: int, n: int) -> int:
        form = self._shape.form(name)
        if form is None:
            return self._values(k, n).pointer
        nbytes = sum(-(-part // ALIGNMENT) * ALIGNMENT for part in form.parts(k, n))
        return self._values(nbytes // 2).pointer

    def _layer(self) -> FusedLayerWeights:
        shape = self._shape
        return FusedLayerWeights(
            input_norm=self._values(shape.hidden).pointer,
            qkv=self._matrix("qkv", shape.hidden, shape.qkv_size),
            o=self._matrix("o", shape.q_size, shape.hidden),
            post_norm=self._values(shape.hidden).pointer,
            gate_up=self._matrix("gate_up", shape.hidden, 2 * shape.inner),
            down=self._matrix("down", shape.inner, shape.hidden),
            q_norm=self._values(shape.head_dim).pointer,
            k_norm=self._values(shape.head_dim).pointer,
        )

    def _inputs(self) -> Iterator[tuple[str, Tensor]]:
        shape, device, rows = self._shape, self._device, self._shape.max_rows
        context = self._conditions.context
        angles = np.arange(shape.capacity)[:, None] * np.logspace(0, -4, shape.rotary_dim // 2)[None]
        yield "rope_cos", on_device(device, np.cos(angles).astype(np.float32))
        yield "rope_sin", on_device(device, np.sin(angles).astype(np.float32))
        yield "position_ids", on_device(device, np.full((rows, 1), context, np.int64))
        yield "kv_length", on_device(device, np.full(rows, context + 1, np.int64))
        yield "inputs_embeds", self._values(rows, 1, shape.hidden)
        yield "logits", device.empty((rows, 1, shape.vocab), np.float32)
        for i in range(shape.layers):
            for kind in ("key", "value"):
                yield f"{kind}_cache_{i}", self._values(rows, shape.kv_heads, shape.capacity, shape.head_dim)


def improve(
    step: TunedStep,
    candidates: Mapping[str, tuple[Any, ...]],
    seconds: Callable[[StepConfig], float | None],
    turns: int,
    program: Callable[[StepConfig], object] = lambda config: config,
) -> Found | None:
    """Let one size after another take other values.

    program: what tells the kernels of a configuration apart; one with the same kernels is not measured. None
    if the row itself cannot be measured.
    """
    best, first = step.config, seconds(step.config)
    if first is None:
        return None
    ratios = 1.0
    for name, values in candidates.items():
        for value in values:
            other = replace(best, **{name: value})
            if program(other) == program(best) or seconds(other) is None:  # compiles it, too
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
    wanted: Callable[[TunedStep], bool],
    conditions: Conditions,
    compile: Compile | None = None,
) -> Iterator[Found]:
    """Yield the results of the wanted rows of a table; compile: None = for the device."""
    for step in tuning.steps:
        if step.weights == ADAPTED or not wanted(step):
            continue
        shape = shape_of(step, conditions)
        print(f"{step.weights}, {step.rows} rows, hidden size {shape.hidden}", file=sys.stderr)
        decoder = Decoder(device, shape, conditions, compile)

        def table(config: StepConfig, step: TunedStep = step) -> Tuning:
            return replace(tuning, steps=(replace(step, config=config), *tuning.steps))

        def seconds(config: StepConfig, decoder: Decoder = decoder, table: Table = table) -> float | None:
            return decoder.seconds(table(config))

        def program(config: StepConfig, decoder: Decoder = decoder, table: Table = table) -> object:
            return decoder.program(table(config))

        found = improve(step, SIZES[step.weights], seconds, conditions.turns, program)
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
    results = list(
        tune(
            device,
            tuning,
            lambda step: step.weights in weights and (not rows or step.rows in rows),
            conditions,
        )
    )
    found = {each.step: each.config for each in results}
    steps = tuple(replace(step, config=found.get(step, step.config)) for step in tuning.steps)
    out = args.out or TABLES / f"{device.arch}.json"
    write_tuning(out, replace(tuning, gpu=device.description.rpartition(" (")[0], steps=steps))
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
