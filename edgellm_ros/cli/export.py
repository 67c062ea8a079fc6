# SPDX-License-Identifier: Apache-2.0
"""`edgellm export`: a checkpoint to an engine directory."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from edgellm_ros.builder.exporter.options import POLICIES, ExportOptions
from edgellm_ros.cli import arguments
from edgellm_ros.cli.option_fields import add_options, read_options

if TYPE_CHECKING:
    from edgellm_ros.builder.calibration.search import GroupScales
    from edgellm_ros.cli.quantization.cost import QuantizationCost
    from edgellm_ros.cli.quantization.policy_cost import ActionCost
    from edgellm_ros.runtime.request import LLMGenerationRequest

NO_REPORT = "no report: a model for speech to text needs sounds: give --prompts with requests that have some"


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand to `edgellm`."""
    parser = subparsers.add_parser(
        "export",
        help="turn a checkpoint into an engine directory",
        description="Write ONNX graphs, embedding table, tokenizer and config of a checkpoint.",
    )
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="directory with config.json and safetensors files, or a GGUF file",
    )
    parser.add_argument(
        "engine_dir",
        metavar="ENGINE_DIR",
        nargs="?",
        help="directory to write; created if missing (with --check: only its disk's free space is read)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; show what would be written, its size and the engine's memory, or why not; files "
        "of --calibrate and --prompts are read, but the model does not run on them",
    )
    add_options(parser, ExportOptions, {POLICIES: "checkpoints of LeRobot, such as SmolVLA"})
    parser.add_argument(
        "--calibrate",
        metavar="PROMPTS",
        help="with --quantize: scale the inputs of layers so that rounding changes least while the model "
        "answers these prompts (AWQ): a text file with a prompt in each line, .jsonl with a prompt or a "
        "request of `edgellm generate --requests` in each line, or a bag (its commands, sounds and frames, "
        "as `edgellm replay` reads them)",
    )
    parser.add_argument(
        "--prompts",
        metavar="PROMPTS",
        help="prompts for the report of --quantize, --cpu-int8 and --kv-cache, as for --calibrate; their "
        "text is that of its perplexity (default: a few prompts of its own, and the text of --calibrate, "
        "else one of its own; a model for speech to text has no report by default); of a policy requests "
        "with images and states in .jsonl (default: random ones)",
    )
    parser.add_argument(
        "--no-report",
        action="store_true",
        help="with --quantize, --cpu-int8 or --kv-cache: skip the report",
    )
    arguments.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Export the checkpoint and report the files; with --check, only report."""
    options = ExportOptions(**read_options(args, ExportOptions))
    if args.calibrate and not args.quantize:
        raise ValueError("--calibrate: chooses scales for rounded weights: add --quantize int4 or int8")
    if args.prompts and not _reports(args):
        raise ValueError(
            "--prompts: there is no report without --quantize, --cpu-int8 or --kv-cache, or with --no-report"
        )
    if args.check:
        return _check(args, options)
    if args.engine_dir is None:
        raise ValueError("ENGINE_DIR is missing; only --check works without it")
    return _export(args, options)


def _reports(args: argparse.Namespace) -> bool:
    """Return whether an export ends with a report."""
    return bool(args.quantize or args.cpu_int8 or args.kv_cache) and not args.no_report


def _export(args: argparse.Namespace, options: ExportOptions) -> int:
    from edgellm_ros.builder.exporter.export import export
    from edgellm_ros.builder.exporter.plan import plan_export
    from edgellm_ros.cli.quantization.cost import PROMPTS
    from edgellm_ros.cli.quantization.perplexity import TEXT
    from edgellm_ros.cli.requests.calibration_requests import read_requests, text_of

    reports = _reports(args)
    if reports and args.precision == "bf16" and not args.cpu_int8:  # which `export` refuses
        option = "--quantize" if args.quantize else "--kv-cache"
        raise ValueError(f"{option}: the report runs on the CPU, which bf16 does not; --no-report skips it")
    start = time.perf_counter()
    prompts: Mapping[str, LLMGenerationRequest] = PROMPTS
    if args.prompts:  # read first: an export takes minutes
        plan = plan_export(Path(args.checkpoint), options)
        prompts = read_requests(args.prompts, plan.config)
    scales, text = _calibrate(args, options) if args.calibrate else ([], TEXT)
    if args.prompts:
        text = text_of(prompts.values())
    config = export(args.checkpoint, args.engine_dir, options, scales=tuple(scales))
    seconds = time.perf_counter() - start
    size = sum(entry.size for entry in config.files)
    print(
        f"{args.engine_dir}: {len(config.files)} files, {size / 1e6:.1f} MB, in {seconds:.1f} s",
        file=sys.stderr,
    )
    if reports and config.transcribes and not args.prompts:
        print(NO_REPORT, file=sys.stderr)
        reports = False
    costs: Mapping[str, QuantizationCost | ActionCost] = {}
    if reports and config.policy is not None:
        costs = _action_costs(args, options, prompts if args.prompts else None)
    elif reports:
        costs = _costs(args, options, prompts, text)
    if args.json:
        files = {entry.path: entry.size for entry in config.files}
        report = {"engine_dir": str(Path(args.engine_dir)), "seconds": seconds, "files": files}
        arguments.print_json(report | {name: dataclasses.asdict(cost) for name, cost in costs.items()})
    return 0


def _calibrate(args: argparse.Namespace, options: ExportOptions) -> tuple[list[GroupScales], str]:
    """Find scales for the rounded weights; return them, and the text of the prompts."""
    from edgellm_ros.cli.quantization.calibration import calibrate

    start = time.perf_counter()
    calibration = calibrate(args.checkpoint, args.engine_dir, args.calibrate, options)
    print(f"{args.calibrate}: {calibration}, in {time.perf_counter() - start:.1f} s", file=sys.stderr)
    return calibration.scales, calibration.text


def _costs(
    args: argparse.Namespace,
    options: ExportOptions,
    prompts: Mapping[str, LLMGenerationRequest],
    text: str,
) -> dict[str, QuantizationCost]:
    """Compare the engine with one of the same checkpoint that is not quantised.

    With scales, also one without. text: for the perplexity. Returns the results by their names in
    the JSON report.
    """
    from edgellm_ros.builder.exporter.export import export
    from edgellm_ros.cli.quantization.cost import measure_costs

    engines = {"quantization": Path(args.engine_dir)}
    with contextlib.ExitStack() as stack:
        if args.calibrate:
            parent = Path(args.engine_dir).absolute().parent
            folder = tempfile.TemporaryDirectory(dir=parent, prefix=".rounded-")
            engines = {"plain_rounding": Path(stack.enter_context(folder)), **engines}
            export(args.checkpoint, engines["plain_rounding"], options, with_draft=False)
        found = measure_costs(args.checkpoint, list(engines.values()), _in_floats(options), prompts, text)
    costs = dict(zip(engines, found, strict=True))
    titles = {"plain_rounding": "plain rounding: ", "quantization": "calibrated: " if args.calibrate else ""}
    for name, cost in costs.items():
        print(f"{titles[name]}{cost}", file=sys.stderr)
    return costs


def _action_costs(
    args: argparse.Namespace, options: ExportOptions, requests: Mapping[str, LLMGenerationRequest] | None
) -> dict[str, ActionCost]:
    """Compare the engine of a policy with one that is not quantised.

    requests: None = random observations. Returns the result by its name in the JSON report.
    """
    from edgellm_ros.cli.quantization.policy_cost import measure_action_cost

    cost = measure_action_cost(args.checkpoint, args.engine_dir, _in_floats(options), requests)
    print(cost, file=sys.stderr)
    return {"quantization": cost}


def _in_floats(options: ExportOptions) -> ExportOptions:
    """Return the options of the engine that a report compares with."""
    return dataclasses.replace(options, quantize=None, cpu_int8=False, kv_cache=None)


def _check(args: argparse.Namespace, options: ExportOptions) -> int:
    from edgellm_ros.builder.exporter.calibration import refuse_policy
    from edgellm_ros.builder.exporter.check import check, render_check
    from edgellm_ros.cli.requests.calibration_requests import read_requests

    report = check(args.checkpoint, options, args.engine_dir or ".")
    if args.calibrate:
        refuse_policy(Path(args.checkpoint), report.config)
    for path, purpose in ((args.calibrate, "the calibration"), (args.prompts, "the report")):
        if path:
            count = len(read_requests(path, report.config))
            print(f"{path}: {count} requests for {purpose}, which --check does not run", file=sys.stderr)
    if args.json:
        arguments.print_json(dataclasses.asdict(report))
    else:
        print(render_check(report))
    if report.disk.short:
        disk = report.disk
        print(
            f"{disk.directory}: the disk is too small: {disk.needed / 1e6:.1f} MB needed, "
            f"{disk.free / 1e6:.1f} MB free",
            file=sys.stderr,
        )
    return 0
