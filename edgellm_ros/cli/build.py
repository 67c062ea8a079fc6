# SPDX-License-Identifier: Apache-2.0
"""`edgellm build`: TensorRT plans for this machine's GPU, or for named GPUs."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from edgellm_ros.cli import arguments
from edgellm_ros.echo import quoted

VERIFICATION_TOKENS = 61  # as in engine_directory.config, which `edgellm --help` does not import


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand to `edgellm`."""
    parser = subparsers.add_parser(
        "build",
        help="compile an engine directory into TensorRT plans",
        description="Compile an engine directory into TensorRT plans. A plan belongs to certain GPUs and one "
        "version of TensorRT or of TensorRT for RTX; the engine directory itself runs without plans.",
    )
    arguments.add_engine_dir(parser)
    parser.add_argument(
        "--gpu",
        type=_gpus,
        default=(),
        metavar="SM[,SM...]",
        help="GPUs to build for with TensorRT for RTX, such as sm_86,sm_89; needs no GPU "
        "(default: the GPU of this machine)",
    )
    parser.add_argument(
        "--version-compatible",
        action="store_true",
        help="make plans that later TensorRT versions and the lean runtime load too; may be slower "
        "(not with TensorRT for RTX)",
    )
    parser.add_argument(
        "--verification-tokens",
        type=arguments.integer(1),
        metavar="N",
        help="largest number of drafted tokens to verify in one run "
        f"(default: {VERIFICATION_TOKENS}, or the size of the KV cache if that is smaller)",
    )
    parser.add_argument(
        "--workspace-mb",
        type=arguments.integer(1),
        metavar="N",
        help="GPU memory in MB (10^6 bytes) that a single kernel may use beside its tensors (default: all)",
    )
    parser.add_argument(
        "--timing-cache",
        type=Path,
        metavar="FILE",
        help="measured kernel times, read and written, so that the next build takes less long "
        "(default: a file in ENGINE_DIR; not with TensorRT for RTX)",
    )
    arguments.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Build all plans and report the files."""
    from edgellm_ros.builder.tensorrt.plan import PlanOptions, build_plans
    from edgellm_ros.engine.device import open_device

    options = PlanOptions(
        gpus=args.gpu,
        workspace_bytes=args.workspace_mb and args.workspace_mb * 10**6,
        timing_cache=args.timing_cache,
        version_compatible=args.version_compatible,
        verification_tokens=args.verification_tokens,
    )
    built = build_plans(
        args.engine_dir,
        lambda: open_device("tensorrt"),
        options,
        lambda line: print(line, file=sys.stderr, flush=True),
    )
    if args.json:
        plans = [
            {"path": str(each.plan.path), "seconds": each.seconds, "bytes": each.plan.bytes} for each in built
        ]
        arguments.print_json({"engine_dir": args.engine_dir, "plans": plans})
    return 0


def _gpus(text: str) -> tuple[str, ...]:
    """Parse names of GPUs, such as "sm_86,sm_89"."""
    names = tuple(text.split(","))
    for name in names:
        if not re.fullmatch(r"sm_[1-9]\d+", name):
            raise argparse.ArgumentTypeError(
                f"expected GPUs by compute capability, such as sm_86,sm_89, got {quoted(name)}"
            )
    return names
