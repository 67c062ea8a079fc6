# SPDX-License-Identifier: Apache-2.0
"""`edgellm demo`: a robot in the arena, driven over ROS 2 topics."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from edgellm_ros.cli import arena_options, arguments
from edgellm_ros.cli.arm import demo as demo_arm

EXECUTIONS = ("auto", "lock_step", "async", "wait")  # values of the arena's parameter
EPISODES_PER_SEED = 1000  # EPISODE_SEEDS of edgellm_arena/episodes/episode.py
LAST_EPISODE_SEED = (arena_options.LAST_SEED + 1) * EPISODES_PER_SEED - 1
CHUNKING = ("off", "guided", "frozen", "trained")  # values of the node's parameter


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand to `edgellm`."""
    parser = subparsers.add_parser(
        "demo",
        help="drive a robot through the arena, or an arm, over ROS 2 topics and draw its path",
        description="Play episodes in closed loop; the arena (camera, odometry, command) and the edgellm "
        "node are two ROS nodes. Writes a picture of each episode, and its spoken command as a WAV file. "
        "With --arm the world is an SO-101 arm that picks and places by a policy. Exit code 1 if an episode "
        "does not finish.",
    )
    arena_options.add_episodes(parser, 1000, 1, "number of episodes")
    arena_options.add_seed(parser, 1, "seed of the episodes")
    parser.add_argument(
        "--episode-seed",
        type=arguments.integer(0, LAST_EPISODE_SEED),
        metavar="N",
        help="play one episode again: the one with this seed, which its line and the summary name; with the "
        "other options of that run, but not --episodes and --seed",
    )
    arena_options.add_family(parser)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/demo"),
        metavar="DIR",
        help="folder for pictures and logs (default: %(default)s)",
    )
    parser.add_argument(
        "--engine",
        type=Path,
        default=arena_options.DEFAULT_ENGINE,
        metavar="DIR",
        help="engine directory, exported if missing or outdated (default: %(default)s)",
    )
    arena_options.add_model(parser)
    parser.add_argument(
        "--action-samples",
        type=arguments.integer(1, 16),
        default=1,
        metavar="N",
        help="trajectories per plan: the first is driven, all are drawn (default: %(default)s)",
    )
    parser.add_argument(
        "--spoken",
        action="store_true",
        help="give commands as speech in noisy rooms on ~/audio, instead of text on ~/command",
    )
    arena_options.add_speech_engine(parser)
    parser.add_argument(
        "--voice",
        default="",
        metavar="NAME",
        help="write what one hears in each episode too, with the robot's answer in this voice: MODEL.onnx of "
        "a Piper voice, or espeak (default: no such file)",
    )
    parser.add_argument(
        "--follower",
        action="store_true",
        help="drive by the velocity commands of the node edgellm_follower instead of the action chunks",
    )
    _add_timing(parser)
    demo_arm.add_options(parser)
    arguments.add_device(parser)
    arguments.add_decode(parser)
    arguments.add_json(parser)
    parser.set_defaults(run=run)


def _add_timing(parser: argparse.ArgumentParser) -> None:
    """Add the options of plans that take time."""
    parser.add_argument(
        "--inference-delay",
        type=arguments.number(0.0, 60.0),
        default=0.0,
        metavar="S",
        help="simulated seconds from a camera frame to the publication of its plan, in steps of 0.1 s "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--execution",
        choices=EXECUTIONS,
        default="auto",
        help="what the robot does while a plan is computed: async = follow the last plan, wait = stand, "
        "lock_step = the node sees no latency (default: async with --inference-delay or --chunking, else "
        "lock_step)",
    )
    parser.add_argument(
        "--chunking",
        choices=("auto", *CHUNKING),
        default="auto",
        help="how the node fits a chunk of actions to the chunk before it (default: trained with "
        "--inference-delay, if the checkpoint is trained for it, else off)",
    )


def voice_name(given: str) -> str:
    """Return the voice for a process in another folder.

    ValueError for a file that is not there.
    """
    from edgellm_ros.voice.voice import ESPEAK

    if not given or given.partition(":")[0] == ESPEAK:
        return given
    if not Path(given).is_file():
        raise ValueError(f"--voice {given}: expected espeak, or the file MODEL.onnx of a Piper voice")
    return str(Path(given).resolve())


def run(args: argparse.Namespace) -> int:
    """Play the episodes and report how they ended."""
    if args.arm:
        return demo_arm.run(args)
    if args.expert:
        raise ValueError("--expert is for the arm: expected --arm too")
    arena_options.require_arena("the demo")
    from edgellm_arena.ros.demo import DemoOptions, run_demo
    from edgellm_arena.ros.display import Display
    from edgellm_ros.ros.world_events import DemoError

    arena_options.check_speech_option(args)
    seed, first_episode = args.seed, 0
    if args.episode_seed is not None:
        if (args.episodes, args.seed) != (1, 1):
            given = f"--episodes {args.episodes} and --seed {args.seed}"
            raise ValueError(f"--episode-seed names one episode of any seed: expected no others, got {given}")
        seed, first_episode = divmod(args.episode_seed, EPISODES_PER_SEED)
    options = DemoOptions(
        episodes=args.episodes,
        seed=seed,
        first_episode=first_episode,
        family=args.family or "",
        out=args.out,
        engine_dir=args.engine,
        checkpoint=args.checkpoint or arena_options.demo_checkpoint("a checkpoint with --checkpoint"),
        device=args.device,
        action_samples=args.action_samples,
        spoken=args.spoken,
        speech_engine=args.speech_engine,
        lora=args.lora,
        decode=args.decode,
        precision=args.precision or "fp32",
        follower=args.follower,
        inference_delay=args.inference_delay,
        execution=args.execution,
        chunking=args.chunking,
        voice=voice_name(args.voice),
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
    if args.json:
        arguments.print_json(summary)
    else:
        understood = f"{summary['understood']} commands understood; " if args.spoken else ""
        print(
            f"{summary['successes']} of {summary['episodes']} episodes at the target, "
            f"{summary['collisions']} collisions, {summary['timeouts']} timeouts; {understood}"
            f"{summary['mean_speed']:.2f} m/s on the way, at least {summary['least_clearance']:.2f} m from "
            f"obstacles; {summary['mean_plan_seconds'] * 1e3:.0f} ms per plan; pictures in {args.out}"
        )
    return 0
