# SPDX-License-Identifier: Apache-2.0
"""Shared by benchmarks: demo engine, requests, options, percentiles, last line."""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgellm_arena.episodes.episode import World, make_episode
from edgellm_ros.builder.export_cache import ARENA_CHECKPOINT, export_if_needed
from edgellm_ros.engine.device import Device
from edgellm_ros.engine.onnxruntime.session import available_cores
from edgellm_ros.runtime.inference_runtime import LLMInferenceRuntime
from edgellm_ros.runtime.request import LLMGenerationRequest

SEED = 20_000  # of the first episode of the benchmarks; tests and demo use other seeds


class StopWatch:
    """Reports the duration of each phase on standard error; `seconds` has it by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = self._last = time.perf_counter()

    def done(self, phase: str, result: str = "") -> None:
        now = time.perf_counter()
        self.seconds[phase], self._last = now - self._last, now
        self.note(f"{phase}: {self.seconds[phase]:.1f} s  {result}")

    def note(self, text: str) -> None:
        """Report a line."""
        now = time.perf_counter() - self._start
        print(f"[{now:6.1f} s] {text}".rstrip(), file=sys.stderr, flush=True)


def parser(description: str | None) -> argparse.ArgumentParser:
    """Make a parser with the options of every benchmark: --engine and --checkpoint."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--engine", type=Path, default=Path("engines/arena"), help="engine directory (default: %(default)s)"
    )
    made.add_argument(
        "--checkpoint",
        type=Path,
        default=ARENA_CHECKPOINT,
        help="checkpoint to export if the engine is missing or outdated (default: the demo's)",
    )
    return made


def engine(args: argparse.Namespace) -> Path:
    """Return the engine directory; export it first if it is missing or outdated."""
    export_if_needed(args.checkpoint, args.engine)
    return args.engine


def add_engines(parser: argparse.ArgumentParser) -> None:
    """Add the option --engines, for benchmarks that compare engines."""
    parser.add_argument(
        "--engines",
        metavar="DIR[,DIR...]",
        help="exported engine directories to compare, in place of --engine; the first one is the reference",
    )


def engines(args: argparse.Namespace) -> list[str]:
    """Return the engine directories of --engines, else that of --engine.

    The directories of --engines are returned as they are; the one of --engine is exported if needed.
    """
    return args.engines.split(",") if args.engines else [str(engine(args))]


def first_look(seed: int, **fields: Any) -> LLMGenerationRequest:
    """Make the first request of an episode: camera frame, command, one trajectory."""
    world = World(make_episode(seed))
    return LLMGenerationRequest(
        prompt=world.episode.command.text, images=(world.camera(),), **{"action_samples": 1, **fields}
    )


def spread(seconds: list[float]) -> dict[str, float]:
    """Compute median and 90th percentile in seconds."""
    ordered = sorted(seconds)
    return {
        "median": statistics.median(ordered),
        "p90": ordered[min(len(ordered) - 1, round(0.9 * (len(ordered) - 1)))],
    }


def numbers(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Return the type of an option whose value is a list, as in "1,8".

    kind: the type of its items.
    """
    return lambda text: [kind(part) for part in text.split(",")]


def machine(device: Device) -> dict[str, Any]:
    """Return the name of a device and the number of cores that this process may use."""
    return {"device_name": device.description, "cores": available_cores()}


def changed(*options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of LLMInferenceRuntime that are not its defaults.

    The result is the argument `changes` of `finish`.

    options: what a benchmark passes to its runtimes; the device is a choice of the user, and left out.
    """
    parameters = inspect.signature(LLMInferenceRuntime).parameters
    return {
        name: value
        for each in options
        for name, value in each.items()
        if name != "device" and value != parameters[name].default
    }


def finish(name: str, changes: dict[str, Any] | None = None, **result: Any) -> dict[str, Any]:
    """Print the result as the last line and return it.

    changes: what the benchmark sets that a user would not, by the name of the argument, option or parameter.
    A line on standard error tells it, and the key `changed_from_defaults`.
    """
    plain = str | int | float | bool
    items = (changes or {}).items()
    shown = {key: value if isinstance(value, plain) else repr(value) for key, value in items}
    text = ", ".join(f"{key}={value}" for key, value in shown.items())
    print(f"changed from the defaults: {text or 'nothing'}", file=sys.stderr)
    result = {"changed_from_defaults": shown, **result}
    print(json.dumps({"benchmark": name, **result}, allow_nan=False), flush=True)
    return result
