# SPDX-License-Identifier: Apache-2.0
"""`edgellm demo --arm`: an SO-101 arm picks and places, over ROS 2 topics."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from edgellm_ros.cli import arena_options, arguments
from edgellm_ros.cli.arm import options as arm_options

OUT, ARENA_OUT = Path("out/demo_arm"), Path("out/demo")
# Options of the demo that only the arena has, with their values where they are not given.
ONLY_ARENA = {
    "episode_seed": None,
    "family": None,
    "lora": "",
    "action_samples": 1,
    "spoken": False,
    "speech_engine": None,
    "voice": "",
    "follower": False,
    "execution": "auto",
    "chunking": "auto",
    "decode": "auto",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the arm to the demo."""
    parser.add_argument(
        "--arm",
        action="store_true",
        help="let an arm pick a block and place it on a mark instead, by a policy of LeRobot: --checkpoint "
        f"(default: {arm_options.DEFAULT_POLICY}), exported to --engine (default: "
        f"{arm_options.DEFAULT_ENGINE}); --out is {OUT} by default (needs edgellm-tabletop)",
    )
    text = "with --arm: the scripted controller makes the chunks in place of a policy"
    arm_options.add_expert(parser, text)
    arm_options.add_follow_time(parser, "with --arm: ")


def run(args: argparse.Namespace) -> int:
    """Play the episodes and report how they ended."""
    for name, default in ONLY_ARENA.items():
        value = getattr(args, name)
        if value != default:
            raise ValueError(f"--{name.replace('_', '-')} {value} is for the arena: not with --arm")
    checkpoint = arm_options.policy_folder(args.checkpoint, args.expert, args.follow_time)
    arm_options.require_tabletop("the arm's demo")
    from edgellm_ros.ros.world_events import DemoError
    from edgellm_tabletop.episodes.summary import table
    from edgellm_tabletop.ros.demo import DemoOptions, run_demo
    from edgellm_tabletop.ros.display import Display

    out = OUT if args.out == ARENA_OUT else args.out
    default = args.engine == arena_options.DEFAULT_ENGINE
    options = DemoOptions(
        episodes=args.episodes,
        seed=args.seed,
        out=out,
        engine_dir=arm_options.DEFAULT_ENGINE if default else args.engine,
        checkpoint=checkpoint,
        device=args.device,
        precision=args.precision or "fp32",
        inference_delay=args.inference_delay,
        follow_time=args.follow_time,
    )
    display = Display(sys.stderr, args.episodes)
    try:
        summary = run_demo(options, display)
    except DemoError as error:
        display.close()
        print(f"edgellm demo: error: {error}", file=sys.stderr)
        return 1
    finally:
        display.close()
    print(table(summary), file=sys.stderr if args.json else sys.stdout)
    print(f"pictures in {out}", file=sys.stderr)
    if args.json:
        arguments.print_json(summary)
    return 0
