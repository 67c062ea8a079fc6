# SPDX-License-Identifier: Apache-2.0
"""The command `edgellm`: one subcommand per file of this folder.

Results go to standard output (with `--json`: one JSON object as the last line), everything else to standard
error. Bad input ends with exit code 2 and one line that says what and where. A subcommand imports what it
needs when it runs, so that `edgellm --help` answers at once and nothing here needs ROS, a GPU or PyTorch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from edgellm_ros.cli import (
    bench,
    build,
    chat,
    demo,
    evaluate,
    export,
    generate,
    inspect,
    replay,
    say,
    security,
    transcribe,
)
from edgellm_ros.cli.remote import connect_policy, serve, serve_policy
from edgellm_ros.echo import escaped
from edgellm_ros.engine.errors import EngineError

SUBCOMMANDS = (
    export, build, inspect, generate, chat, transcribe, say, bench, demo, replay, evaluate, serve,
    serve_policy, connect_policy, security,
)  # fmt: skip
BAD_INPUT = 2
# Errors of bad input. Any other error is a bug and keeps its traceback.
BAD_INPUT_ERRORS = (ValueError, OSError, ImportError, NotImplementedError, EngineError)
INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class _Parser(argparse.ArgumentParser):
    """A parser that reports bad input on one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: error: {escaped(message)} (see {self.prog} --help)\n")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command.

    Each subcommand sets `run(args) -> exit code`.
    """
    parser = _Parser(
        prog="edgellm",
        description="Language, vision and action models on the edge, for ROS 2 and without it.",
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    for module in SUBCOMMANDS:
        module.add_parser(subparsers)
    for subparser in subparsers.choices.values():
        subparser.add_argument("--debug", action="store_true", help="show the Python traceback of an error")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    0: done; 1: the work itself failed; 2: bad input; 130: interrupted.
    """
    args = make_parser().parse_args(argv)
    try:
        code = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output closed the pipe (edgellm ... | head)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except BAD_INPUT_ERRORS as error:
        if args.debug:
            raise
        print(f"edgellm {args.command}: error: {one_line(error)}", file=sys.stderr)
        return BAD_INPUT


def one_line(error: BaseException) -> str:
    """Return the message of an error without line breaks or control characters.

    The message of an OSError names its file.
    """
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename is not None else ""
        return escaped(f"{where}{error.strerror}")
    return escaped(" ".join(str(error).split())) or type(error).__name__
