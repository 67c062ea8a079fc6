# SPDX-License-Identifier: Apache-2.0
"""Options of commands that play episodes of the arena, and the demo's checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from edgellm_ros.cli import arguments

DEFAULT_ENGINE = Path("engines/arena")
LAST_SEED = 10**12


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
        choices=arguments.PRECISIONS,
        help="type of the exported weights and of the KV cache (default: fp32)",
    )
    parser.add_argument(
        "--lora", default="", metavar="NAME", help="LoRA adapter to use (default: the base model)"
    )


def demo_checkpoint(instead: str) -> Path:
    """Return the demo's checkpoint.

    ValueError where there is none, which tells the user to name `instead`.
    """
    from edgellm_ros.builder.export_cache import ARENA_CHECKPOINT

    if not ARENA_CHECKPOINT.is_dir():
        raise ValueError(f"name {instead}: the demo's checkpoint is only in a clone of the repository")
    return ARENA_CHECKPOINT
