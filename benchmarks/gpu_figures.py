# SPDX-License-Identifier: Apache-2.0
"""The figures of a GPU in README.md and docs/performance.md, in one run.

Runs the benchmarks of FIGURES one after another, each in a process of its own, as a user would call them.
The demo's checkpoint is exported first, in fp16 and fp32. Standard error has the output of each and its
figures as rows, with the table that they are for; with --out, DIR has the last line of each as NAME.json.

Conditions
----------
Those of each benchmark. The most important figures come first: --seconds leaves out the last ones.

Examples
--------
    python -m benchmarks.gpu_figures --out out/gpu
    python -m benchmarks.gpu_figures --only paths_arena,paths_1.7b
    python -m benchmarks.gpu_figures --device cpu --only plan_fp32

Last JSON line: `figures` by name, and `failed`: the names of commands that failed.

"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import finish
from benchmarks.decode_paths import table
from edgellm_ros.builder.export_cache import ARENA_CHECKPOINT, export_if_needed
from edgellm_ros.cli.arguments import DEVICES

Rows = list[str]


@dataclass(frozen=True)
class Figure:
    """A command whose last line has figures, and the rows that they become.

    command: arguments of python, with {device}, {arena} (the demo's checkpoint), {fp16} and {fp32} (engine
    directories of it) in place of values.
    """

    command: str
    where: str  # the table that has the rows
    rows: Callable[[dict[str, Any]], Rows]


def plan_rows(result: dict[str, Any]) -> Rows:
    """Format a plan of `edgellm bench`: its stages, and the parts of a drafting round."""
    stages = {name: times["median"] * 1e3 for name, times in result["stages"].items()}
    rows = [
        f"plan {stages['total_s']:.2f} ms: {result['tokens']} tokens, {result['trajectories']} trajectories; "
        + ", ".join(f"{name.removesuffix('_s')} {value:.2f}" for name, value in stages.items())
    ]
    if result.get("round_s"):
        parts = ", ".join(f"{name} {1e3 * seconds:.4f} ms" for name, seconds in result["round_s"].items())
        rows.append(f"a round of drafting: {parts}")
    return rows


def path_rows(result: dict[str, Any]) -> Rows:
    """Format the paths of `decode --paths`."""
    difference = f"largest difference of a path from the loop: {result['largest_difference']:.1%}"
    return [*table(result["paths"]).splitlines(), difference]


def decode_rows(result: dict[str, Any]) -> Rows:
    """Format the row of each batch size of `decode`."""
    return [
        f"batch {figures['batch']}: {figures['decode_ms']['median']:.3f} ms per step, "
        f"{figures['tokens_per_s']:.0f} tokens/s, {figures['share_of_copy_bandwidth']:.0%} of the copy "
        f"bandwidth, prefill {figures['prefill_ms']['median']:.1f} ms, "
        f"memory {result['memory_overhead']:.1%} over weights and KV"
        for figures in result["batches"]
    ]


def speculation_rows(result: dict[str, Any]) -> Rows:
    """Format each setting of `speculation`."""
    return [
        f"batch {batch['batch']}, {each['setting']}: {each['tokens_per_verification']:.2f} tokens per "
        f"verification ({each['acceptance']}), {each['round_ms']:.3f} ms per round, {each['token_ms']:.3f} "
        f"per token; vanilla {batch['off']['token_ms']:.3f}; {each['times_vanilla']:.2f} times vanilla"
        for batch in result["batches"]
        for each in batch["settings"]
    ]


def length_rows(result: dict[str, Any]) -> Rows:
    """Format the passes of `prompt_lengths`."""
    first, second = (
        {part: 1e3 * seconds for part, seconds in result["prefill_seconds"][name].items()}
        for name in ("first", "second")
    )
    ratio = result["first_to_second"]
    return [
        f"prefill of {result['prompts']} new lengths: median {first['median']:.2f} ms, later "
        f"{second['median']:.2f} ({ratio['median']:.2f} times); p99 {first['p99']:.2f} ms, later "
        f"{second['p99']:.2f} ({ratio['p99']:.2f} times); start {result['start_seconds']:.1f} s"
    ]


BENCH = "-m edgellm_ros bench"
DECODE = "-m benchmarks.decode --device {device} --no-transformers"
LENGTHS = "-m benchmarks.prompt_lengths --device {device}"
SPECULATION = "-m benchmarks.speculation --device {device} --precision fp16 --runs 3"
PERFORMANCE = "docs/performance.md"
FIGURES = {  # the most important ones first
    "paths_arena": Figure(
        f"{DECODE} --checkpoint {{arena}} --paths",
        f"{PERFORMANCE}, CUDA graphs of decode steps",
        path_rows,
    ),
    "paths_1.7b": Figure(
        f"{DECODE} --shape qwen3-1.7b --paths", f"{PERFORMANCE}, CUDA graphs of decode steps", path_rows
    ),
    "decode_1.7b": Figure(
        f"{DECODE} --shape qwen3-1.7b --batch 1,8 --context 500 --tokens 128",
        f"README.md, How well it does; {PERFORMANCE}, Measured on an H200",
        decode_rows,
    ),
    "lengths_1.7b": Figure(
        f"{LENGTHS} --shape qwen3-1.7b --lengths 60,900",
        f"{PERFORMANCE}, CUDA graphs of decode steps",
        length_rows,
    ),
    "lengths_arena": Figure(
        f"{LENGTHS} --engines {{fp16}}", f"{PERFORMANCE}, CUDA graphs of decode steps", length_rows
    ),
    "plan_fp16": Figure(
        f"{BENCH} {{fp16}} --device {{device}}",
        f"README.md, How well it does; {PERFORMANCE}, The demo's model",
        plan_rows,
    ),
    "plan_fp32": Figure(
        f"{BENCH} {{fp32}} --device {{device}}",
        f"README.md, How well it does; {PERFORMANCE}, The demo's model",
        plan_rows,
    ),
    "drafting_arena": Figure(
        f"{SPECULATION} --checkpoint {{arena}} --scenes 30 --settings chain4,chain7",
        "docs/speculative_decoding.md, What a round costs",
        speculation_rows,
    ),
    "drafting_1.7b": Figure(
        f"{SPECULATION} --shape qwen3-1.7b --acceptance 3 --tokens 60 --settings chain3,tree4/4/16",
        "docs/speculative_decoding.md, What a round costs",
        speculation_rows,
    ),
    "decode_0.6b": Figure(
        f"{DECODE} --shape qwen3-0.6b --batch 1,8", f"{PERFORMANCE}, Measured on an H200", decode_rows
    ),
    "decode_4b": Figure(
        f"{DECODE} --shape qwen3-4b --batch 1,8", f"{PERFORMANCE}, Measured on an H200", decode_rows
    ),
    "decode_8b": Figure(
        f"{DECODE} --shape qwen3-8b --batch 1,8", f"{PERFORMANCE}, Measured on an H200", decode_rows
    ),
}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    args = _parse(arguments)
    figures: dict[str, Any] = {}
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        values = {"device": args.device, "arena": str(ARENA_CHECKPOINT)}
        for precision in ("fp16", "fp32"):
            values[precision] = f"{temporary}/{precision}"
            if any(f"{{{precision}}}" in FIGURES[name].command for name in args.only):
                export_if_needed(ARENA_CHECKPOINT, Path(values[precision]), precision=precision)
        start = time.monotonic()
        for name in args.only:
            if args.seconds is not None and time.monotonic() - start > args.seconds:
                failed.append(f"{name} (not begun: {args.seconds:g} s are over)")
                continue
            found = run(name, values, args.out)
            if found is None:
                failed.append(name)
            else:
                figures[name] = found
    return finish("gpu_figures", device=args.device, figures=figures, failed=failed)


def run(name: str, values: dict[str, str], out: Path | None) -> dict[str, Any] | None:
    """Run a command and print its rows; return its last line, None if it fails."""
    figure = FIGURES[name]
    words = [word.format(**values) for word in shlex.split(figure.command)]
    print(f"== {name}: python {shlex.join(words)}", file=sys.stderr, flush=True)
    start = time.monotonic()
    done = subprocess.run([sys.executable, *words], stdout=subprocess.PIPE, text=True)
    seconds = time.monotonic() - start
    if done.returncode != 0:
        print(f"== {name} failed after {seconds:.0f} s", file=sys.stderr, flush=True)
        return None
    last = done.stdout.splitlines()[-1]
    result: dict[str, Any] = json.loads(last)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.json").write_text(last + "\n")
    rows = "\n".join(f"   {row}" for row in figure.rows(result))
    print(f"== {name}, {seconds:.0f} s, for {figure.where}:\n{rows}", file=sys.stderr, flush=True)
    return result


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=DEVICES, default="cuda", help="device to run on (default: %(default)s)")
    add(
        "--only",
        type=_names,
        default=list(FIGURES),
        metavar="NAME[,NAME...]",
        help=f"of {', '.join(FIGURES)} (default: all, in this order)",
    )
    add("--seconds", type=float, help="begin no further command after this time (default: no limit)")
    add("--out", type=Path, metavar="DIR", help="folder for the last line of each command (default: none)")
    return parser.parse_args(arguments)


def _names(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in FIGURES]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown figure {unknown[0]!r}, expected {', '.join(FIGURES)}")
    return names


if __name__ == "__main__":
    main()
