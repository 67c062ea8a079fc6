# SPDX-License-Identifier: Apache-2.0
"""`edgellm inspect`: files, graphs and memory of an engine directory."""

from __future__ import annotations

import argparse
import dataclasses

from edgellm_ros.cli import arguments


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand to `edgellm`."""
    parser = subparsers.add_parser(
        "inspect",
        help="config, bindings and memory of an engine directory",
        description="Check an engine directory; show its config, the bindings of its graphs, its memory.",
    )
    arguments.add_engine_dir(parser)
    parser.add_argument(
        "--verify", action="store_true", help="compare the SHA-256 of every file, not only sizes"
    )
    arguments.add_without(parser)
    arguments.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read the directory and print the report."""
    from edgellm_ros.builder.report.inspection import inspect, render

    report = inspect(args.engine_dir, args.verify, args.without)
    if args.json:
        arguments.print_json(dataclasses.asdict(report))
    else:
        print(render(report))
    return 0
