# SPDX-License-Identifier: Apache-2.0
"""`edgellm evaluate arena`: episodes in process.

The report has the share of successes by distance and obstacles.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from edgellm_ros.cli import arena_options, arguments
from edgellm_ros.cli.arena_options import DEFAULT_ENGINE

if TYPE_CHECKING:
    from edgellm_ros.engine_directory.config import EngineConfig
    from edgellm_ros.evaluation.evaluation import Evaluation

MOST_EPISODES = 1_000_000


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add the kind of evaluation to `edgellm evaluate`."""
    parser = subparsers.add_parser(
        "arena",
        help="episodes of the arena, in process",
        description="Play episodes in closed loop. The runtime is called directly, so that the same options "
        "give the same results on any number of workers; `edgellm demo` plays over ROS 2 topics.",
    )
    text = "number of episodes; a larger one continues an evaluation"
    arena_options.add_episodes(parser, MOST_EPISODES, 200, text)
    arena_options.add_seed(parser, 20_000, "seed of the first episode; the next one has S + 1")
    arena_options.add_family(parser)
    parser.add_argument(
        "--engine",
        type=Path,
        metavar="DIR",
        help=f"engine directory (default: {DEFAULT_ENGINE}); it is exported, if missing or outdated, by "
        "default or with --checkpoint or --precision, and else taken as it is",
    )
    arena_options.add_model(parser)
    parser.add_argument("--spoken", action="store_true", help="speak the commands in noisy rooms")
    arena_options.add_speech_engine(parser)
    arguments.add_decode(parser, auto=False)
    arena_options.add_workers(parser)
    return parser


def prepare(args: argparse.Namespace, status: Callable[[str], None]) -> Evaluation:
    """Check the options; export the engine if needed."""
    arena_options.require_arena("an evaluation of episodes")
    import onnxruntime

    from edgellm_arena.evaluation.picture import draw
    from edgellm_arena.evaluation.summary import summarise, table
    from edgellm_arena.evaluation.task import ArenaTask
    from edgellm_ros.engine_directory.adapters.adapter_folder import canonical_name
    from edgellm_ros.evaluation.evaluation import Evaluation
    from edgellm_ros.evaluation.task import code_digest, engine_digest

    engine_dir, config = _engine(args, status)
    arena_options.check_speech_option(args)
    _check_drives(engine_dir, config, args.spoken and args.speech_engine is None)
    engine = engine_digest(engine_dir, args.lora)
    speech_engine = engine_digest(args.speech_engine) if args.speech_engine is not None else ""

    def task(workers: int) -> ArenaTask:
        return ArenaTask(
            engine_dir=engine_dir.resolve(),
            engine=engine,
            device=args.device,
            decode=args.decode,
            threads=args.threads,
            lora=args.lora,
            spoken=args.spoken,
            family=args.family,
            workers=workers,
            speech_engine_dir=args.speech_engine and args.speech_engine.resolve(),
            speech_engine=speech_engine,
        )

    options = {
        "seed": args.seed,
        "engine": engine,
        "precision": config.precision,
        "lora": canonical_name(args.lora),
        "spoken": args.spoken,
        "speech_engine": speech_engine,
        "family": args.family,
        "device": args.device,
        "decode": args.decode,
        "threads": args.threads,
        "onnxruntime": onnxruntime.__version__,
        "code": code_digest("edgellm_arena"),
    }
    items = [str(args.seed + number) for number in range(args.episodes)]
    word = {"success": "at the target", "collision": "collided", "timeout": "timed out"}
    return Evaluation(
        kind="arena",
        options=options,
        items=items,
        task=task,
        word=lambda outcome: word[outcome["result"]["outcome"]],
        summarise=summarise,
        table=table,
        draw=draw,
    )


def _engine(args: argparse.Namespace, status: Callable[[str], None]) -> tuple[Path, EngineConfig]:
    """Return the engine directory and its configuration."""
    from edgellm_ros.builder.export_cache import export_if_needed
    from edgellm_ros.engine_directory.config import EngineConfig

    directory = args.engine or DEFAULT_ENGINE
    if args.engine is not None and args.checkpoint is None and args.precision is None:
        return directory, EngineConfig.load(directory)
    instead = "a checkpoint with --checkpoint or an engine directory with --engine"
    checkpoint = args.checkpoint or arena_options.demo_checkpoint(instead)
    config = export_if_needed(
        checkpoint,
        directory,
        lambda: status(f"exporting {checkpoint} to {directory} ..."),
        precision=args.precision or "fp32",
    )
    return directory, config


def _check_drives(engine_dir: Path, config: EngineConfig, spoken: bool) -> None:
    """Raise ValueError for an engine that lacks a part that episodes need."""
    config.check_answers_with_text("the arena")
    parts = {"vision encoder": config.vision, "action head": config.action}
    if spoken:
        parts["audio encoder"] = config.audio
    for name, part in parts.items():
        if part is None:
            hint = ": leave --spoken out" if name == "audio encoder" else ": it cannot drive in the arena"
            raise ValueError(f"{engine_dir} has no {name}{hint}")
