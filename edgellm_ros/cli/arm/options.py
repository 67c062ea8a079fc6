# SPDX-License-Identifier: Apache-2.0
"""Options of commands that play episodes of the arm, and its policy.

The arm's world is the Python package `edgellm_tabletop`, a distribution of its own, which needs MuJoCo.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from edgellm_ros.cli.arguments import number

DEFAULT_POLICY = Path("models/so101")
DEFAULT_ENGINE = Path("engines/so101")


def add_expert(parser: argparse.ArgumentParser, text: str) -> None:
    """Add the option --expert, described by `text`."""
    parser.add_argument("--expert", action="store_true", help=text)


def add_follow_time(parser: argparse.ArgumentParser, when: str = "") -> None:
    """Add the option --follow-time; `when` begins its description."""
    parser.add_argument(
        "--follow-time",
        type=number(0.0, 60.0),
        default=0.0,
        metavar="S",
        help=f"{when}edgellm_arm's follow_time: seconds for which a chunk is followed before the arm rests "
        "and the next frame is taken; 0 = take frames in motion (default: %(default)s)",
    )


def require_tabletop(what: str) -> None:
    """Raise ImportError unless `edgellm_tabletop` and MuJoCo can be imported."""
    try:
        import edgellm_tabletop.simulation  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"{what} needs the distribution edgellm-tabletop with MuJoCo ({error}): "
            "pip install edgellm-tabletop, or in a clone pip install -e ./edgellm_tabletop"
        ) from None


def policy_folder(given: Path | None, expert: bool, follow_time: float) -> Path | None:
    """Return the folder of the policy to export; None with `expert`.

    ValueError if there is none, with what makes one, and for `expert` with a follow_time: the scripted
    controller goes on from chunks that are followed until the next.
    """
    if expert and follow_time:
        raise ValueError(f"--follow-time {follow_time:g} and --expert: expected one of them")
    if expert:
        if given is not None:
            raise ValueError(f"--checkpoint {given} and --expert: expected one of them")
        return None
    folder = given or DEFAULT_POLICY
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"no policy in {folder}: make it with `python -m training.arm --out {folder}` "
            "(training/README.md), name another folder with --checkpoint, or let the scripted controller "
            "play with --expert"
        )
    return folder
