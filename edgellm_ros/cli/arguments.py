# SPDX-License-Identifier: Apache-2.0
"""Types of command-line arguments, and the output of results as JSON."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from typing import Any

from edgellm_ros.echo import printable, quoted

DEVICES = ("cpu", "cuda", "tensorrt")


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """Return a parser of whole numbers in [low, high].

    No upper bound if `high` is None.
    """

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a whole number, got {quoted(text)}") from None
        if value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(
                f"expected a whole number {_range(low, high)}, got {printable(text)}"
            )
        return value

    return parse


def number(low: float, high: float | None = None) -> Callable[[str], float]:
    """Return a parser of finite numbers in [low, high].

    No upper bound if `high` is None.
    """

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a number, got {quoted(text)}") from None
        if not math.isfinite(value) or value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"expected a number {_range(low, high)}, got {printable(text)}")
        return value

    return parse


SEED = integer(0, 2**64 - 1)


def add_engine_dir(parser: argparse.ArgumentParser) -> None:
    """Add the positional argument ENGINE_DIR."""
    parser.add_argument("engine_dir", metavar="ENGINE_DIR", help="directory made by `edgellm export`")


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add the option --device."""
    parser.add_argument(
        "--device", choices=DEVICES, default="cpu", help="where the engines run (default: %(default)s)"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option --json."""
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line of standard output"
    )


def print_json(result: dict[str, Any]) -> None:
    """Print one line of strict JSON (NaN and infinity are errors, never printed)."""
    print(json.dumps(result, allow_nan=False, ensure_ascii=False), flush=True)


def _range(low: float, high: float | None) -> str:
    return f"of at least {low}" if high is None else f"from {low} to {high}"
