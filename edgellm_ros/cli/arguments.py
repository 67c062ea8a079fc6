# SPDX-License-Identifier: Apache-2.0
"""Types of command-line arguments, and the output of results as JSON."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from edgellm_ros.echo import printable, quoted
from edgellm_ros.strict_json import strict_json

if TYPE_CHECKING:
    from edgellm_ros.engine_directory.config import EngineConfig
    from edgellm_ros.runtime.decoding.speculative.drafting_config import SpecDecodeDraftingConfig

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


def _add_plan_code(parser: argparse.ArgumentParser) -> None:
    """Add the option --allow-plan-code."""
    parser.add_argument(
        "--allow-plan-code",
        action="store_true",
        help="with --device tensorrt: load version-compatible plans too, which contain code that runs in "
        "this process; for plans whose origin you trust",
    )


def add_runtime(parser: argparse.ArgumentParser) -> None:
    """Add the options that `runtime_options` reads."""
    _add_drafting(parser)
    add_device(parser)
    _add_plan_code(parser)
    add_decode(parser)
    _add_graphs(parser)
    add_without(parser)


def _add_graphs(parser: argparse.ArgumentParser) -> None:
    """Add the option --no-cuda-graphs."""
    parser.add_argument(
        "--no-cuda-graphs",
        dest="cuda_graphs",
        action="store_false",
        help="on a GPU: launch each kernel, in place of decode steps recorded as CUDA graphs; the tokens are "
        "the same",
    )


def add_without(parser: argparse.ArgumentParser) -> None:
    """Add the option --without."""
    parser.add_argument(
        "--without",
        type=_parts,
        default=(),
        metavar="PART[,PART]",
        help="parts of the engine directory that are not opened, to save memory: visual, audio, action "
        "(default: none)",
    )


def _parts(text: str) -> tuple[str, ...]:
    """Return the names of parts that are left out."""
    from edgellm_ros.engine_directory.parts import check_without

    names = tuple(text.split(","))
    try:
        check_without(names)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return names


def runtime_options(args: argparse.Namespace, config: EngineConfig) -> dict[str, Any]:
    """Return the arguments of LLMInferenceRuntime for the options of `add_runtime`.

    ValueError for an option that has no meaning with this engine.
    """
    return {
        "device": args.device,
        "drafting": _drafting(args, config),
        "decode": args.decode,
        "allow_plan_code": args.allow_plan_code,
        "cuda_graphs": args.cuda_graphs,
        "without": args.without,
    }


def _add_drafting(parser: argparse.ArgumentParser) -> None:
    """Add the options of speculative decoding."""
    group = parser.add_argument_group(
        "speculative decoding", "several tokens per run of the model; the answer is the same"
    )
    group.add_argument(
        "--drafting",
        choices=("auto", "off", "eagle", "mtp", "dflash", "lookup"),
        default="auto",
        help="eagle, mtp, dflash: drafts of the engine's draft head of this kind; lookup: what followed the "
        "newest tokens earlier in the text; auto: the draft head if the engine has one, else off "
        "(default: %(default)s)",
    )
    for name, least, text in (
        ("--draft-top-k", 1, "candidates of each token of a draft, and tokens of a level that are continued"),
        ("--draft-steps", 1, "levels of a draft: one round yields at most one token more"),
        ("--verify-tree-size", 2, "tokens that the model verifies in one run, the newest one included"),
    ):
        group.add_argument(name, type=integer(least), metavar="N", help=f"{text} (default: the drafter's)")


def add_decode(parser: argparse.ArgumentParser, auto: bool = True) -> None:
    """Add the option --decode.

    auto: with the value `auto`, whose choice depends on the computer, as the default; else `engine` is it.
    """
    parser.add_argument(
        "--decode",
        choices=("auto", "engine", "fused") if auto else ("engine", "fused"),
        default="auto" if auto else "engine",
        help="what executes decode steps and the action head's Euler steps: the engine, or the fused kernels "
        f"(--device cuda, fp16 or bf16){'; auto: the faster one' if auto else ''} (default: %(default)s)",
    )


def _drafting(args: argparse.Namespace, config: EngineConfig) -> SpecDecodeDraftingConfig | None:
    """Return the configuration for the options of `_add_drafting` and this engine.

    ValueError for an option that has no meaning.
    """
    from edgellm_ros.runtime.decoding.speculative.drafting_config import DRAFTING, OFF, drafting_config

    sizes = {
        "--draft-top-k": args.draft_top_k,
        "--draft-steps": args.draft_steps,
        "--verify-tree-size": args.verify_tree_size,
    }
    given = [name for name, value in sizes.items() if value is not None]
    if args.drafting == OFF and given:
        raise ValueError(f"{given[0]} needs --drafting {', '.join(each for each in DRAFTING if each != OFF)}")
    if args.drafting in ("dflash", "lookup") and args.draft_top_k is not None:
        raise ValueError(f"--draft-top-k is for --drafting eagle and mtp: {args.drafting} drafts a chain")
    return drafting_config(args.drafting, config, args.device == "cpu", *sizes.values())


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option --json."""
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line of standard output"
    )


def print_json(result: dict[str, Any]) -> None:
    """Print one line of strict JSON (NaN and infinity are errors, never printed)."""
    print(strict_json(result), flush=True)


def _range(low: float, high: float | None) -> str:
    return f"of at least {low}" if high is None else f"from {low} to {high}"
