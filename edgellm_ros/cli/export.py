# SPDX-License-Identifier: Apache-2.0
"""`edgellm export`: a Hugging Face checkpoint to an engine directory."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm_ros.cli import arguments

if TYPE_CHECKING:
    from edgellm_ros.builder.quantization.search import GroupScales
    from edgellm_ros.cli.quantization_cost import QuantizationCost
    from edgellm_ros.runtime.request import LLMGenerationRequest

QUANTIZE, GROUP_SIZES = ("int4", "int8"), (32, 64, 128)  # as in builder.quantization.rounding
KV_CACHES = ("fp8",)  # as in engine_directory.config


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand to `edgellm`."""
    parser = subparsers.add_parser(
        "export",
        help="turn a checkpoint into an engine directory",
        description="Write ONNX graphs, embedding table, tokenizer and config of a Hugging Face checkpoint.",
    )
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="directory with config.json and safetensors files"
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
    parser.add_argument(
        "--precision",
        choices=arguments.PRECISIONS,
        default="fp32",
        help="type of weights and KV cache (default: %(default)s)",
    )
    parser.add_argument(
        "--kv-cache",
        choices=KV_CACHES,
        help="store keys and values in 8 bits (E4M3), and report what that cost in logits; not for TensorRT "
        "and draft heads (default: as --precision)",
    )
    for option, default, text in (
        ("--max-batch-size", 4, "sequences decoded together"),
        ("--max-input-len", 320, "longest prompt in tokens, images and sound included"),
        ("--max-kv-cache-capacity", 448, "longest prompt plus answer in tokens"),
    ):
        parser.add_argument(
            option,
            type=arguments.integer(1),
            default=default,
            metavar="N",
            help=f"{text} (default: %(default)s)",
        )
    parser.add_argument(
        "--max-lora-rank",
        type=arguments.integer(0),
        metavar="N",
        help="largest rank of LoRA adapters; 0: the engine takes none (default: what the adapters in "
        "CHECKPOINT/lora need, which are copied)",
    )
    parser.add_argument(
        "--hidden-states",
        type=_layers,
        default=(),
        metavar="N[,N...]",
        help="layers, from 1, whose hidden states become outputs (default: none)",
    )
    parser.add_argument(
        "--lm-head-input",
        action="store_true",
        help="make the LM head's matrix an input, so that it can be exchanged at run time",
    )
    parser.add_argument(
        "--vocab-map",
        metavar="FILE",
        help="safetensors file whose tensor vocab_map lists the tokens to generate (default: all)",
    )
    heads = parser.add_mutually_exclusive_group()
    heads.add_argument(
        "--draft",
        metavar="HEAD_DIR",
        help="directory of an EAGLE-3 draft head for this checkpoint (default: CHECKPOINT/draft, if any)",
    )
    heads.add_argument("--no-draft", action="store_true", help="export no draft head")
    for option, least, text in (
        ("--max-draft-tree-size", 1, "drafted tokens of a sequence in the KV cache of the draft head"),
        ("--max-verify-tree-size", 2, "drafted tokens and the one before them that are verified in one run"),
    ):
        parser.add_argument(
            option,
            type=arguments.integer(least),
            default=64,
            metavar="N",
            help=f"most {text} (default: %(default)s)",
        )
    parser.add_argument(
        "--quantize",
        choices=QUANTIZE,
        help="round the weights of the language model's layers to nearest, and report what that cost in "
        "logits (default: keep the checkpoint's)",
    )
    parser.add_argument(
        "--group-size",
        type=int,
        choices=GROUP_SIZES,
        default=64,
        help="inputs that share a scale, with --quantize (default: %(default)s)",
    )
    parser.add_argument(
        "--calibrate",
        metavar="PROMPTS",
        help="with --quantize: scale the inputs of layers so that rounding changes least while the model "
        "answers these prompts (AWQ): a text file with a prompt in each line, .jsonl with a prompt or a "
        "request of `edgellm generate --requests` in each line, or a bag (its commands, sounds and frames, "
        "as `edgellm replay` reads them)",
    )
    parser.add_argument(
        "--cpu-int8",
        action="store_true",
        help="let the graphs for a CPU multiply in 8 bits, encoders and draft head included, and report what "
        "that cost in logits; other devices compute as without it (needs --precision fp32)",
    )
    parser.add_argument(
        "--prompts",
        metavar="PROMPTS",
        help="prompts for the report of --quantize, --cpu-int8 and --kv-cache, as for --calibrate (default: "
        "a few of its own)",
    )
    parser.add_argument(
        "--no-report",
        action="store_true",
        help="with --quantize, --cpu-int8 or --kv-cache: skip the report",
    )
    policies = parser.add_argument_group("policies", "checkpoints of LeRobot, such as SmolVLA")
    policies.add_argument(
        "--vlm",
        metavar="DIR",
        help="config.json and tokenizer.json of the policy's vision language model (default: CHECKPOINT/vlm, "
        "or the folder that the policy names)",
    )
    policies.add_argument(
        "--dataset",
        metavar="DIR",
        help="the folder meta of the LeRobot data set that the policy was trained with: names of the values "
        "of state and action, rate, statistics (default: the checkpoint's statistics, 30 actions per second)",
    )
    arguments.add_json(parser)
    parser.set_defaults(run=run)


def _layers(text: str) -> tuple[int, ...]:
    """Parse numbers from 1 separated by commas to a rising tuple."""
    return tuple(sorted({arguments.integer(1)(part) for part in text.split(",")}))


def run(args: argparse.Namespace) -> int:
    """Export the checkpoint and report the files; with --check, only report."""
    options = {
        "precision": args.precision,
        "max_batch_size": args.max_batch_size,
        "max_input_len": args.max_input_len,
        "max_kv_cache_capacity": args.max_kv_cache_capacity,
        "max_lora_rank": args.max_lora_rank,
        "hidden_state_layers": args.hidden_states,
        "lm_head_input": args.lm_head_input,
        "vocab_map": args.vocab_map,
        "vlm": args.vlm,
        "dataset": args.dataset,
        "draft": args.draft,
        "with_draft": not args.no_draft,
        "max_draft_tree_size": args.max_draft_tree_size,
        "max_verify_tree_size": args.max_verify_tree_size,
        "quantize": args.quantize,
        "group_size": args.group_size,
        "cpu_int8": args.cpu_int8,
        "kv_cache": args.kv_cache,
    }
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


def _export(args: argparse.Namespace, options: dict[str, Any]) -> int:
    from edgellm_ros.builder.export_plan import ExportOptions, plan_export
    from edgellm_ros.builder.exporter import export
    from edgellm_ros.cli.calibration_requests import read_requests
    from edgellm_ros.cli.quantization_cost import PROMPTS

    reports = _reports(args)
    if reports and args.precision == "bf16" and not args.cpu_int8:  # which `export` refuses
        option = "--quantize" if args.quantize else "--kv-cache"
        raise ValueError(f"{option}: the report runs on the CPU, which bf16 does not; --no-report skips it")
    start = time.perf_counter()
    prompts: Mapping[str, LLMGenerationRequest] = PROMPTS
    if args.prompts:  # read first: an export takes minutes
        plan = plan_export(Path(args.checkpoint), ExportOptions(**options))
        prompts = read_requests(args.prompts, plan.config)
    scales = _calibrate(args, options) if args.calibrate else []
    config = export(args.checkpoint, args.engine_dir, **options, scales=scales)
    seconds = time.perf_counter() - start
    size = sum(entry.size for entry in config.files)
    print(
        f"{args.engine_dir}: {len(config.files)} files, {size / 1e6:.1f} MB, in {seconds:.1f} s",
        file=sys.stderr,
    )
    costs = _costs(args, options, prompts) if reports else {}
    if args.json:
        files = {entry.path: entry.size for entry in config.files}
        report = {"engine_dir": str(Path(args.engine_dir)), "seconds": seconds, "files": files}
        arguments.print_json(report | {name: dataclasses.asdict(cost) for name, cost in costs.items()})
    return 0


def _calibrate(args: argparse.Namespace, options: dict[str, Any]) -> list[GroupScales]:
    """Find scales for the rounded weights."""
    from edgellm_ros.builder.export_plan import ExportOptions
    from edgellm_ros.cli.calibration import calibrate

    start = time.perf_counter()
    calibration = calibrate(args.checkpoint, args.engine_dir, args.calibrate, ExportOptions(**options))
    print(f"{args.calibrate}: {calibration}, in {time.perf_counter() - start:.1f} s", file=sys.stderr)
    return calibration.scales


def _costs(
    args: argparse.Namespace, options: dict[str, Any], prompts: Mapping[str, LLMGenerationRequest]
) -> dict[str, QuantizationCost]:
    """Compare the engine with one of the same checkpoint that is not quantised.

    With scales, also one without. Returns the results by their names in the JSON report.
    """
    from edgellm_ros.builder.exporter import export
    from edgellm_ros.cli.quantization_cost import measure_costs

    reference = {**options, "quantize": None, "cpu_int8": False, "kv_cache": None}
    engines = {"quantization": Path(args.engine_dir)}
    with contextlib.ExitStack() as stack:
        if args.calibrate:
            parent = Path(args.engine_dir).absolute().parent
            folder = tempfile.TemporaryDirectory(dir=parent, prefix=".rounded-")
            engines = {"plain_rounding": Path(stack.enter_context(folder)), **engines}
            export(args.checkpoint, engines["plain_rounding"], **{**options, "with_draft": False})
        found = measure_costs(args.checkpoint, list(engines.values()), reference, prompts)
    costs = dict(zip(engines, found, strict=True))
    titles = {"plain_rounding": "plain rounding: ", "quantization": "calibrated: " if args.calibrate else ""}
    for name, cost in costs.items():
        print(f"{titles[name]}{cost}", file=sys.stderr)
    return costs


def _check(args: argparse.Namespace, options: dict[str, Any]) -> int:
    from edgellm_ros.builder.export_check import check, render_check
    from edgellm_ros.builder.export_plan import ExportOptions
    from edgellm_ros.cli.calibration_requests import read_requests

    report = check(args.checkpoint, ExportOptions(**options), args.engine_dir or ".")
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
