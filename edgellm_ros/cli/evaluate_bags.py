# SPDX-License-Identifier: Apache-2.0
"""`edgellm evaluate bags`: replay every bag of a folder.

The outputs are compared with expected ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from edgellm_ros.cli import arguments, replay

if TYPE_CHECKING:
    from edgellm_ros.evaluation.evaluation import Evaluation


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add the kind of evaluation to `edgellm evaluate`."""
    parser = subparsers.add_parser(
        "bags",
        help="replays of all bags of a folder, compared with expected outputs",
        description="Play each bag of a folder into a node of its own, as `edgellm replay` does, and compare "
        "the outputs with the expected bag of the same name. Exit code 0: all are equal; 1: a bag differs; "
        "2: bad input; 3: a replay failed.",
    )
    parser.add_argument("bags", type=Path, metavar="DIR", help="bags: folders, .mcap or .db3 files")
    parser.add_argument(
        "--expect",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder of output bags of earlier replays: of the bag NAME or NAME.mcap, the folder NAME",
    )
    replay.add_node_options(parser)
    parser.add_argument(
        "--processes",
        type=arguments.integer(1, 100),
        default=1,
        metavar="N",
        help="replays at a time; each has a node, which uses all cores (default: %(default)s)",
    )
    return parser


def prepare(args: argparse.Namespace, status: Callable[[str], None]) -> Evaluation:
    """Find the bags and their expected outputs; check the options."""
    import onnxruntime

    from edgellm_ros.engine_directory.config import EngineConfig
    from edgellm_ros.evaluation.bags import find_bags
    from edgellm_ros.evaluation.bags_picture import draw
    from edgellm_ros.evaluation.bags_summary import summarise, table
    from edgellm_ros.evaluation.bags_task import BagsTask
    from edgellm_ros.evaluation.evaluation import Evaluation
    from edgellm_ros.evaluation.task import code_digest, engine_digest, file_digest
    from edgellm_ros.replay.inputs import parse_remappings
    from edgellm_ros.ros.camera_topic import camera_names
    from edgellm_ros.ros.processes import require_ros

    require_ros("a replay")
    remappings = parse_remappings(args.remap)
    outputs = args.out / "outputs"
    bags = find_bags(args.bags, args.expect, outputs)
    adapter = args.lora.partition("=")[2]
    engine_dir = replay.find_engine(args.engine, status).resolve()
    if args.cameras:
        camera_names(args.cameras, EngineConfig.load(engine_dir).policy)
    task = BagsTask(
        bags={bag.item: bag for bag in bags},
        out=outputs.resolve(),
        engine_dir=engine_dir,
        engine=engine_digest(engine_dir, "" if adapter else args.lora),
        device=args.device,
        remappings=remappings,
        tolerance=args.tolerance,
        noise_seed=args.noise_seed,
        params=args.params.resolve() if args.params is not None else None,
        lora=args.lora,
        standing=args.no_odometry,
        cameras=args.cameras,
    )
    options = {
        "engine": task.engine,
        "device": args.device,
        "remap": remappings,
        "tolerance": args.tolerance,
        "noise_seed": args.noise_seed,
        "params": file_digest(args.params) if args.params is not None else None,
        "lora": args.lora,
        "adapter": file_digest(Path(adapter)) if adapter else None,
        "no_odometry": args.no_odometry,
        "cameras": list(args.cameras),
        "onnxruntime": onnxruntime.__version__,
        "code": code_digest(),
    }
    return Evaluation(
        kind="bags",
        options=options,
        items=[bag.item for bag in bags],
        task=lambda workers: task,
        word=lambda outcome: "equal" if outcome["result"]["equal"] else "different",
        summarise=summarise,
        table=table,
        draw=draw,
    )
