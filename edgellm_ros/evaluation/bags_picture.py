# SPDX-License-Identifier: Apache-2.0
"""Draws the summary of replayed bags as one picture: a bar for each bag."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgellm_ros.evaluation import drawing
from edgellm_ros.evaluation.bags_summary import bag_name
from edgellm_ros.evaluation.drawing import Canvas
from edgellm_ros.evaluation.results_file import Results

WIDTH, HEADER, ROW, GAP = 1800, 150, 46, 28
LABEL, BAR = 520, 760  # px of a name and of a bar
MOST = 60  # bags in the picture; those that failed or differ come first
LONGEST = 36  # characters of a name
LONGEST_WORDS = 40


def draw(path: Path, results: Results, summary: Mapping[str, Any]) -> None:
    """Write the picture as PNG."""
    rows = [(bag_name(item), None) for item in summary["unfinished"]]
    rows += [(bag["name"], bag) for bag in sorted(summary["comparisons"], key=lambda bag: bag["equal"])]
    shown = rows[:MOST]
    canvas = Canvas(WIDTH, HEADER + ROW * (len(shown) + (len(rows) > MOST)) + 2 * GAP)
    _header(canvas, summary, len(rows))
    box = (GAP, HEADER, WIDTH - GAP, canvas.image.height - GAP)
    canvas.draw.rounded_rectangle(box, 14, fill=drawing.PANEL)
    for index, (name, bag) in enumerate(shown):
        _row(canvas, HEADER + ROW // 2 + 14 + ROW * index, name, bag)
    if len(rows) > MOST:
        y = canvas.image.height - GAP - ROW // 2 - 4
        canvas.text(2 * GAP, y, f"and {len(rows) - MOST} more", drawing.SMALL, drawing.FAINT, "lm")
    canvas.save(path)


def _row(canvas: Canvas, y: int, name: str, bag: Mapping[str, Any] | None) -> None:
    label = name if len(name) <= LONGEST else name[: LONGEST - 3] + "..."
    canvas.text(2 * GAP, y, label, drawing.TEXT, drawing.INK, "lm")
    left = 2 * GAP + LABEL
    box = (left, y - 12, left + BAR, y + 12)
    if bag is None:
        canvas.draw.rectangle(box, drawing.GRID)
        canvas.text(left + BAR + 24, y, "replay failed", drawing.SMALL, drawing.AMBER, "lm")
        return
    canvas.draw.rectangle(box, drawing.GREEN)
    if bag["differing"]:
        width = max(4.0, BAR * bag["differing"] / bag["messages"])
        canvas.draw.rectangle((left + BAR - width, y - 12, left + BAR, y + 12), drawing.RED)
    words, color = f"all {bag['messages']} messages equal", drawing.FAINT
    if not bag["equal"]:
        first = bag["first"]
        words = f"{bag['differing']} of {bag['messages']} differ: {first['topic']} {first['field']}"
        color = drawing.RED
    words = words if len(words) <= LONGEST_WORDS else words[: LONGEST_WORDS - 3] + "..."
    canvas.text(left + BAR + 24, y, words, drawing.SMALL, color, "lm")


def _header(canvas: Canvas, summary: Mapping[str, Any], bags: int) -> None:
    canvas.text(GAP + 4, 62, f"{summary['equal']} of {bags} bags give the expected outputs", 46)
    options = summary["options"]
    facts = (
        f"{summary['messages'] - summary['differing_messages']} of {summary['messages']} messages equal   "
        f"tolerance {options['tolerance']:g}   device {options['device']}   engine {options['engine'][:12]}"
    )
    canvas.text(GAP + 6, 112, facts, 24, drawing.FAINT)
