# SPDX-License-Identifier: Apache-2.0
"""Options of commands that play episodes of the arena, and the demo's checkpoint.

The arena is the Python package `edgellm_arena`, a distribution of its own.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from edgellm_ros.cli import arguments
from edgellm_ros.engine_directory.choices import PRECISIONS

DEFAULT_ENGINE = Path("engines/arena")
LAST_SEED = 10**12
FAMILIES = ("random", "dead_ahead", "out_of_sight")  # EPISODE_FAMILIES of edgellm_arena/episodes/episode.py


def add_episodes(parser: argparse.ArgumentParser, most: int, default: int, text: str) -> None:
    """Add the option --episodes: at most `most`, described by `text`."""
    parser.add_argument(
        "--episodes",
        type=arguments.integer(1, most),
        default=default,
        metavar="N",
        help=f"{text} (default: %(default)s)",
    )


def add_seed(parser: argparse.ArgumentParser, default: int, text: str) -> None:
    """Add the option --seed, described by `text`."""
    parser.add_argument(
        "--seed",
        type=arguments.integer(0, LAST_SEED),
        default=default,
        metavar="S",
        help=f"{text} (default: %(default)s)",
    )


def add_family(parser: argparse.ArgumentParser) -> None:
    """Add the option --family (None if it is not given)."""
    parser.add_argument(
        "--family",
        choices=FAMILIES,
        help="play episodes of this family only: random, dead_ahead (an obstacle in the way) or out_of_sight "
        "(the robot must turn to find the target) (default: seven of ten random, the others dead_ahead)",
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the options --checkpoint, --precision (None if it is not given) and --lora."""
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="checkpoint to export (default: the demo's, models/arena of a clone)",
    )
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        help="type of the exported weights and of the KV cache (default: fp32)",
    )
    parser.add_argument(
        "--lora", default="", metavar="NAME", help="LoRA adapter to use (default: the base model)"
    )


def add_speech_engine(parser: argparse.ArgumentParser) -> None:
    """Add the option --speech-engine (None if it is not given)."""
    parser.add_argument(
        "--speech-engine",
        type=Path,
        metavar="DIR",
        help="with --spoken: engine directory of a model for speech, such as Qwen3-ASR, which transcribes "
        "the commands (default: the model itself hears)",
    )


def check_speech_option(args: argparse.Namespace) -> None:
    """Raise ValueError for a speech engine that cannot be used.

    That is one without --spoken, or one that writes no transcripts.
    """
    from edgellm_ros.hearing.transcriber import speech_engine_config

    if args.speech_engine is None:
        return
    if not args.spoken:
        raise ValueError(
            f"--speech-engine {args.speech_engine} is for spoken commands: expected --spoken too"
        )
    speech_engine_config(args.speech_engine)


def require_arena(what: str) -> None:
    """Raise ImportError unless the package `edgellm_arena` can be imported."""
    try:
        import edgellm_arena  # noqa: F401
    except ImportError:
        raise ImportError(
            f"no Python package edgellm_arena: {what} needs the distribution edgellm-arena: "
            "pip install edgellm-arena, or in a clone pip install ./edgellm_arena"
        ) from None


def demo_checkpoint(instead: str) -> Path:
    """Return the demo's checkpoint.

    ValueError where there is none, which tells the user to name `instead`.
    """
    from edgellm_ros.builder.export_cache import ARENA_CHECKPOINT

    if not ARENA_CHECKPOINT.is_dir():
        raise ValueError(f"name {instead}: the demo's checkpoint is only in a clone of the repository")
    return ARENA_CHECKPOINT


def add_workers(parser: argparse.ArgumentParser) -> None:
    """Add the workers of an evaluation in process."""
    parser.add_argument(
        "--threads",
        type=arguments.integer(1, 1024),
        default=1,
        metavar="N",
        help="threads of one worker on the CPU; the results depend on it by rounding (default: %(default)s)",
    )
    parser.add_argument(
        "--processes",
        type=arguments.integer(1, 4096),
        metavar="N",
        help="workers at a time (default: one for each --threads cores; 1 on a GPU; with --ray as many as "
        "the cluster has room for)",
    )
