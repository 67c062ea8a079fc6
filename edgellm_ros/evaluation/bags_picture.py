# SPDX-License-Identifier: Apache-2.0
"""Draws the summary of replayed bags as one picture: a bar for each bag."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgellm_ros.echo import escaped
from edgellm_ros.evaluation import drawing
from edgellm_ros.evaluation.bags_summary import bag_name
from edgellm_ros.evaluation.results_file import Results

ROW, AXIS = 0.3, 0.75  # inches of a bag, and of the axis
THICK = 0.6  # of a bar, in rows
MOST = 60  # bags in the picture; those that failed or differ come first
LONGEST = 36  # characters of a name
LONGEST_WORDS = 40
THINNEST = 0.5  # per cent of the bar that are seen


def draw(path: Path, results: Results, summary: Mapping[str, Any]) -> None:
    """Write the picture as PNG.

    ImportError without Matplotlib.
    """
    failed = [bag_name(item) for item in summary["unfinished"]]
    bags = sorted(summary["comparisons"], key=lambda bag: bag["equal"])
    names = [*failed, *(bag["name"] for bag in bags)]
    failed, bags = failed[:MOST], bags[: max(0, MOST - len(failed))]
    shown = len(failed) + len(bags)
    labels = [_short(name, LONGEST) for name in names[:shown]]
    labels += [f"and {len(names) - shown} more"] * (len(names) > shown)
    rows = range(len(failed), shown)
    red = [max(THINNEST, 100 * bag["differing"] / bag["messages"]) if bag["differing"] else 0 for bag in bags]
    green = [100 - width for width in red]
    height = drawing.HEADER + AXIS + ROW * len(labels)
    title = f"{summary['equal']} of {len(names)} bags give the expected outputs"
    with drawing.picture(path, height, title, _facts(summary)) as figure:
        axes = figure.subplots()
        axes.barh(range(len(failed)), 100, THICK, color=drawing.GRID)
        axes.barh(rows, green, THICK, color=drawing.GREEN)
        axes.barh(rows, red, THICK, green, color=drawing.RED)
        words = [("replay failed", drawing.INK)] * len(failed) + [_words(bag) for bag in bags]
        for row, (text, color) in enumerate(words):
            axes.text(102, row, text, color=color, va="center")
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(len(labels) - 0.4, -0.6)
        axes.set_xlim(0, 100)
        axes.xaxis.set_major_formatter("{x:g}%")
        axes.set_xlabel("share of the messages")
        axes.grid(False)


def _words(bag: Mapping[str, Any]) -> tuple[str, str]:
    """Return what is written beside a bar, and its colour."""
    if bag["equal"]:
        return f"all {bag['messages']} messages equal", drawing.FAINT
    first = bag["first"]
    text = f"{bag['differing']} of {bag['messages']} differ: {first['topic']} {first['field']}"
    return _short(text, LONGEST_WORDS), drawing.RED


def _facts(summary: Mapping[str, Any]) -> str:
    options = summary["options"]
    return (
        f"{summary['messages'] - summary['differing_messages']} of {summary['messages']} messages equal   "
        f"tolerance {options['tolerance']:g}   device {options['device']}   engine {options['engine'][:12]}"
    )


def _short(text: str, most: int) -> str:
    text = escaped(text)
    return text if len(text) <= most else text[: most - 3] + "..."
