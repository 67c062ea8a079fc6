# SPDX-License-Identifier: Apache-2.0
"""`edgellm build`: TensorRT plans for this machine's GPU."""

from __future__ import annotations

import argparse

from edgellm_ros.cli import arguments


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand to `edgellm`."""
    parser = subparsers.add_parser(
        "build",
        help="compile an engine directory into TensorRT plans for this machine's GPU",
        description="Compile an engine directory into TensorRT plans. Plans belong to one GPU and one "
        "TensorRT; the engine directory itself runs without them.",
    )
    arguments.add_engine_dir(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check the engine directory, then say that this version has no TensorRT backend yet."""
    from edgellm_ros.runtime.config import EngineConfig

    EngineConfig.load(args.engine_dir)
    raise NotImplementedError(
        f"{args.engine_dir}: TensorRT plans need a GPU with TensorRT, which this version of edgellm_ros "
        "cannot use yet; the engine directory runs as it is with --device cpu"
    )
