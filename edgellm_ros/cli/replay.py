# SPDX-License-Identifier: Apache-2.0
"""`edgellm replay`: play a bag into the live node and compare the outputs."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from edgellm_ros.cli import arguments
from edgellm_ros.cli.arena_options import DEFAULT_ENGINE, demo_checkpoint

FAILED = 3  # exit code; 1: the outputs differ, 2: bad input
STORAGES = ("mcap", "sqlite3")  # as in replay.recording, whose import would slow `edgellm --help` down


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand to `edgellm`."""
    parser = subparsers.add_parser(
        "replay",
        help="play a recorded bag into the node and compare its outputs",
        description="Play a rosbag2 bag (sqlite3 or mcap) into the edgellm node, one message at a time, by "
        "the bag's clock, write its outputs to another bag, and compare them with those of an earlier "
        "replay. Exit code 0: done, and equal if compared; 1: outputs differ; 2: bad input; 3: the replay "
        "failed (the node died, outputs were lost, or the node of --attach has unsuitable parameters).",
    )
    parser.add_argument("bag", type=Path, metavar="BAG", help="bag to play")
    parser.add_argument("--out", type=Path, required=True, metavar="BAG", help="bag to write; must not exist")
    parser.add_argument(
        "--expect", type=Path, metavar="BAG", help="output bag of an earlier replay to compare with"
    )
    add_node_options(parser)
    parser.add_argument(
        "--storage",
        choices=STORAGES,
        default=STORAGES[0],
        help="storage format of the output bag (default: %(default)s)",
    )
    parser.add_argument(
        "--attach",
        action="store_true",
        help="play into a node that is already running, as launch/replay.launch.py starts it",
    )
    parser.add_argument("--overlay", action="store_true", help="record ~/overlay too; it is not compared")
    arguments.add_device(parser)
    arguments.add_json(parser)
    parser.set_defaults(run=run)


def add_node_options(parser: argparse.ArgumentParser) -> None:
    """Add the options about the node, its inputs and the comparison.

    `edgellm evaluate bags` shares them.
    """
    parser.add_argument(
        "--tolerance",
        type=arguments.number(0.0),
        default=1e-3,
        metavar="T",
        help="largest allowed difference of numbers in actions and paths, in their units "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--remap",
        action="append",
        default=[],
        metavar="FROM:=TO",
        help="topic of the bag to use as an input of the node, e.g. /camera/image_raw:=~/image (default: "
        "/edgellm/image, /edgellm/odom, /edgellm/command and /edgellm/audio, of a policy also "
        "/edgellm/joint_states and /edgellm/CAMERA/image)",
    )
    parser.add_argument(
        "--cameras",
        type=lambda text: tuple(text.split(",")),
        default=(),
        metavar="NAME[,NAME...]",
        help="a policy's cameras that the robot has, the first one on ~/image (default: as in --params, or "
        "all of the policy)",
    )
    parser.add_argument(
        "--no-odometry", action="store_true", help="play a bag without odometry: the robot stands still"
    )
    parser.add_argument(
        "--engine",
        type=Path,
        metavar="DIR",
        help=f"engine directory (default: {DEFAULT_ENGINE}, exported if missing or outdated)",
    )
    parser.add_argument("--params", type=Path, metavar="FILE", help="YAML file with parameters of the node")
    parser.add_argument(
        "--noise-seed",
        type=arguments.integer(0, 2**63 - 1),
        metavar="N",
        help="seed of the action noise (default: the node's parameter)",
    )
    parser.add_argument(
        "--lora",
        default="",
        metavar="NAME[=PATH]",
        help="LoRA adapter to use: the name of one that the node loads, NAME=PATH for a PEFT directory or "
        ".safetensors file, or base for the base model (default: the node's parameter)",
    )


def run(args: argparse.Namespace) -> int:
    """Replay the bag; report the outputs and the comparison."""
    from edgellm_ros.replay.inputs import parse_remappings
    from edgellm_ros.ros.replay.replay import ReplayError, ReplayOptions, attach_replay, run_replay

    def status(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    remappings = parse_remappings(args.remap)
    engine = find_engine(args.engine, status)
    options = ReplayOptions(
        bag=args.bag,
        out=args.out,
        engine_dir=engine,
        device=args.device,
        remappings=remappings,
        expect=args.expect,
        tolerance=args.tolerance,
        noise_seed=args.noise_seed,
        params=args.params,
        lora=args.lora,
        storage=args.storage,
        overlay=args.overlay,
        standing=args.no_odometry,
        cameras=args.cameras,
    )
    start = time.perf_counter()
    try:
        result = attach_replay(options, status) if args.attach else run_replay(options, status)
    except ReplayError as error:
        print(f"edgellm replay: error: {error}", file=sys.stderr)
        return FAILED
    comparison = result.comparison
    if args.json:
        summary = {
            "out": str(args.out),
            "seconds": time.perf_counter() - start,
            "inputs": result.inputs,
            "became": result.became,
            "outputs": result.outputs,
            "comparison": asdict(comparison) if comparison is not None else None,
        }
    else:
        print(result.report(str(args.out)))
    if comparison is not None:
        print(
            comparison.report(str(args.expect), args.tolerance), file=sys.stderr if args.json else sys.stdout
        )
    if args.json:
        arguments.print_json(summary)
    return 1 if comparison is not None and comparison.first is not None else 0


def find_engine(engine: Path | None, status: Callable[[str], None]) -> Path:
    """Return the engine directory of --engine, or the default one.

    The default one is exported if it is missing or outdated.
    """
    from edgellm_ros.builder.export_cache import export_if_needed

    if engine is not None:
        return engine
    checkpoint = demo_checkpoint("an engine directory with --engine")
    export_if_needed(checkpoint, DEFAULT_ENGINE, lambda: status(f"exporting to {DEFAULT_ENGINE} ..."))
    return DEFAULT_ENGINE
