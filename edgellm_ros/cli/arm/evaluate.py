# SPDX-License-Identifier: Apache-2.0
"""`edgellm evaluate arm`: episodes of picking and placing, in process."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from edgellm_ros.cli import arena_options, arguments
from edgellm_ros.cli.arm import options as arm_options

if TYPE_CHECKING:
    from edgellm_ros.evaluation.evaluation import Evaluation

MOST_EPISODES = 1_000_000
FIRST_SEED = 900_000  # of `python -m training.arm --score`


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add the kind of evaluation to `edgellm evaluate`."""
    parser = subparsers.add_parser(
        "arm",
        help="episodes of an arm that picks and places, in process (needs edgellm-tabletop)",
        description="Play episodes in closed loop. The runtime and the logic of edgellm_arm are called "
        "directly, so that the same options give the same results on any number of workers; `edgellm demo "
        "--arm` plays over ROS 2 topics.",
    )
    text = "number of episodes; a larger one continues an evaluation"
    arena_options.add_episodes(parser, MOST_EPISODES, 100, text)
    arena_options.add_seed(parser, FIRST_SEED, "seed of the first episode; the next one has S + 1")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help=f"policy as LeRobot saves it (default: {arm_options.DEFAULT_POLICY})",
    )
    parser.add_argument(
        "--engine",
        type=Path,
        default=arm_options.DEFAULT_ENGINE,
        metavar="DIR",
        help="engine directory, exported if missing or outdated (default: %(default)s)",
    )
    parser.add_argument(
        "--precision",
        choices=arena_options.PRECISIONS,
        default="fp32",
        help="type of the exported weights (default: %(default)s)",
    )
    arm_options.add_expert(parser, "play with the scripted controller in place of a policy")
    parser.add_argument(
        "--delay",
        type=arguments.number(0.0, 10.0),
        default=0.0,
        metavar="S",
        help="simulated seconds from a camera frame to its chunk, in steps of 0.1 s (default: %(default)s)",
    )
    parser.add_argument(
        "--blend",
        type=arguments.number(0.0, 10.0),
        default=0.2,
        metavar="S",
        help="edgellm_arm's blend_time: seconds to pass from one chunk to the next (default: %(default)s)",
    )
    arm_options.add_follow_time(parser)
    arena_options.add_workers(parser)
    return parser


def prepare(args: argparse.Namespace, status: Callable[[str], None]) -> Evaluation:
    """Check the options; export the policy if needed."""
    checkpoint = arm_options.policy_folder(args.checkpoint, args.expert, args.follow_time)
    arm_options.require_tabletop("an evaluation of the arm")
    import mujoco
    import onnxruntime

    from edgellm_ros.evaluation.evaluation import Evaluation
    from edgellm_ros.evaluation.task import code_digest, engine_digest, file_digest
    from edgellm_tabletop.episodes.drivers import CONTRACT
    from edgellm_tabletop.episodes.summary import table
    from edgellm_tabletop.evaluation.picture import draw
    from edgellm_tabletop.evaluation.task import ArmTask, export_policy, summarise_results

    engine = ""
    if checkpoint is not None:
        export_policy(checkpoint, args.engine, status, args.precision)
        engine = engine_digest(args.engine)

    def task(workers: int) -> ArmTask:
        return ArmTask(
            engine_dir=None if checkpoint is None else args.engine.resolve(),
            engine=engine,
            device=args.device,
            threads=args.threads,
            delay=args.delay,
            blend=args.blend,
            follow_time=args.follow_time,
            workers=workers,
        )

    options = {
        "seed": args.seed,
        "driver": "expert" if args.expert else "policy",
        "engine": engine,
        "precision": args.precision,
        "delay": args.delay,
        "blend": args.blend,
        "follow_time": args.follow_time,
        "device": args.device,
        "threads": args.threads,
        "onnxruntime": onnxruntime.__version__,
        "mujoco": mujoco.__version__,
        "contract": file_digest(CONTRACT),
        "code": code_digest("edgellm_tabletop"),
    }
    return Evaluation(
        kind="arm",
        options=options,
        items=[str(args.seed + number) for number in range(args.episodes)],
        task=task,
        word=lambda outcome: outcome["result"]["outcome"],
        summarise=summarise_results,
        table=table,
        draw=draw,
    )
