# SPDX-License-Identifier: Apache-2.0
"""`edgellm evaluate`: many episodes or bags, by local processes or Ray."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from edgellm_ros.cli import arguments, evaluate_arena, evaluate_bags
from edgellm_ros.cli.arm import evaluate as evaluate_arm

if TYPE_CHECKING:
    from edgellm_ros.evaluation.evaluation import Evaluation

DIFFERENT, FAILED = 1, 3  # exit codes, as of `edgellm replay`
KINDS = {"arena": evaluate_arena, "arm": evaluate_arm, "bags": evaluate_bags}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the subcommand to `edgellm`."""
    parser = subparsers.add_parser(
        "evaluate",
        help="many episodes of the arena or of an arm, or many bags, with a table and a picture",
        description="Evaluate an engine on many items. --out gets results.jsonl, summary.json and "
        "summary.png (needs the extra edgellm[charts]); the same command continues an evaluation that was "
        "interrupted. Exit code 0: done; 1: a bag differs; 2: bad input; 3: an item failed.",
    )
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True, help="what to evaluate")
    for name, module in KINDS.items():
        kind = module.add_parser(kinds)
        _add_common(kind, Path("out/evaluate") / name)
        kind.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def _add_common(parser: argparse.ArgumentParser, out: Path) -> None:
    parser.add_argument(
        "--out", type=Path, default=out, metavar="DIR", help="folder for the results (default: %(default)s)"
    )
    parser.add_argument(
        "--restart", action="store_true", help="discard the results that --out has, and start over"
    )
    parser.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="spread the work over a Ray cluster: the one at ADDRESS, of RAY_ADDRESS or of this computer, or "
        "else a new one on this computer (needs the extra edgellm[ray])",
    )
    arguments.add_device(parser)
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Execute what is left of the evaluation; report all of it."""
    from edgellm_ros.evaluation.task import WorkerError
    from edgellm_ros.ros.processes import terminated_as_interrupted

    def status(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    evaluation: Evaluation = KINDS[args.kind].prepare(args, status)
    try:
        with terminated_as_interrupted():
            _execute(evaluation, args, status)
    except WorkerError as error:
        print(f"edgellm evaluate: error: {error}", file=sys.stderr)
        return FAILED
    return _report(evaluation, args, status)


def _execute(evaluation: Evaluation, args: argparse.Namespace, status: Callable[[str], None]) -> None:
    from edgellm_ros.evaluation.evaluation import Spreading, execute
    from edgellm_ros.evaluation.progress import Progress
    from edgellm_ros.evaluation.results_file import ResultsFile

    path, items = results_path(args), evaluation.items
    with ResultsFile(path, evaluation.kind, evaluation.options, args.restart) as file:
        before = sum(item in file.finished for item in items)
        if before:
            status(f"{before} of {len(items)} {evaluation.kind} results are in {path} already")
        progress = Progress(sys.stderr, len(items), before)
        try:
            spreading = Spreading(args.processes, args.ray)
            execute(evaluation.task, items, file, spreading, progress, evaluation.word)
        except KeyboardInterrupt:
            progress.close()
            done = sum(item in file.finished for item in items)
            status(f"interrupted after {done} of {len(items)}; the same command does the rest")
            raise
        finally:
            progress.close()


def _report(evaluation: Evaluation, args: argparse.Namespace, status: Callable[[str], None]) -> int:
    """Write and print the summary, all of it from the results file."""
    from edgellm_ros.atomic_file import write_atomically
    from edgellm_ros.evaluation.results_file import read_results
    from edgellm_ros.strict_json import strict_json

    results = read_results(results_path(args))
    summary = evaluation.summarise(results, evaluation.items)
    write_atomically(args.out / "summary.json", strict_json(summary, indent=1).encode() + b"\n")
    files, picture = "results.jsonl and summary.json", args.out / "summary.png"
    try:
        evaluation.draw(picture, results, summary)
        files = "results.jsonl, summary.json and summary.png"
    except ImportError as error:
        picture.unlink(missing_ok=True)  # of earlier results
        status(f"{error}; the same command then draws it")
    print(evaluation.table(summary), file=sys.stderr if args.json else sys.stdout)
    status(f"{files} are in {args.out}")
    for item, reason in summary["unfinished"].items():
        status(f"edgellm evaluate: error: {item} failed: {reason}")
    if args.json:
        arguments.print_json(summary)
    if summary["unfinished"]:
        return FAILED
    return DIFFERENT if summary.get("different") else 0


def results_path(args: argparse.Namespace) -> Path:
    """Return the results file of --out."""
    return args.out / "results.jsonl"
