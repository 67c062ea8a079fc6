# SPDX-License-Identifier: Apache-2.0
"""Draws the summary of played episodes as one picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgellm_ros.evaluation import drawing
from edgellm_ros.evaluation.drawing import Canvas, Frame, Panel, draw_histogram, draw_shares
from edgellm_ros.evaluation.results_file import Results
from edgellm_ros.evaluation.shares import Share

WIDTH, HEADER, GAP = 1800, 150, 28
PANEL_HEIGHT = 540
OBSTACLES = {"0": "no obstacle", "1": "1 obstacle"}
WAYS = {"clear": "way clear", "blocked": "way blocked"}


def draw(path: Path, results: Results, summary: Mapping[str, Any]) -> None:
    """Write the picture as PNG.

    It shows successes by distance and by obstacles, latencies, and times to the target.
    """
    canvas = Canvas(WIDTH, HEADER + 2 * (PANEL_HEIGHT + GAP))
    _header(canvas, summary)
    width = (WIDTH - 3 * GAP) // 2
    frames = [
        Frame(GAP + column * (width + GAP), HEADER + row * (PANEL_HEIGHT + GAP), width, PANEL_HEIGHT)
        for row in range(2)
        for column in range(2)
    ]
    note = "with 95% intervals"
    by_distance = [(name, _share(group)) for name, group in summary["by_distance"].items()]
    draw_shares(
        Panel(canvas, frames[0], "At the target, by distance", note),
        by_distance,
        "metres from start to target",
    )
    obstacles = [
        (OBSTACLES.get(name, f"{name} obstacles"), _share(group))
        for name, group in summary["by_obstacles"].items()
    ]
    ways = [(WAYS[name], _share(summary["by_way"][name])) for name in WAYS if name in summary["by_way"]]
    draw_shares(
        Panel(canvas, frames[1], "At the target, by obstacles", note),
        [*obstacles, *ways],
        "grey obstacles in the room; any solid on the straight line to the target",
        divided=len(obstacles),
    )
    measured = [results.finished[str(row["seed"])]["measured"] for row in summary["drives"]]
    plans = [1e3 * second for each in measured for second in each["plan_s"]]
    words = [1e3 * second for each in measured for second in each["first_words_s"]]
    beside = " or ".join(map(str, summary["measured"]["workers"]))
    draw_histogram(
        Panel(canvas, frames[2], "Latency", f"{len(plans)} plans, workers at a time: {beside}"),
        [("first words", drawing.TEAL, words), ("whole plan", drawing.BLUE, plans)],
        "milliseconds",
        "ms",
    )
    times = [row["time"] for row in summary["drives"] if row["outcome"] == "success"]
    draw_histogram(
        Panel(canvas, frames[3], "Time to the target", f"{len(times)} episodes, simulated"),
        [("reached", drawing.GREEN, times)],
        "seconds",
        "s",
    )
    canvas.save(path)


def _header(canvas: Canvas, summary: Mapping[str, Any]) -> None:
    options, successes = summary["options"], summary["successes"]
    title = f"{successes['count']} of {successes['of']} episodes at the target"
    wide = canvas.text(GAP + 4, 62, title, 46)
    if successes["of"]:
        share, low, high = (100 * successes[name] for name in ("share", "low", "high"))
        interval = f"{share:.1f}%, 95% interval {low:.1f} to {high:.1f}%"
        canvas.text(GAP + 4 + wide + 28, 62, interval, 28, drawing.FAINT)
    x = float(canvas.image.width - GAP)
    for count, one, many, color in (
        (summary["timeouts"], "timeout", "timeouts", drawing.AMBER),
        (summary["collisions"], "collision", "collisions", drawing.RED),
    ):
        words = f"{count} {one if count == 1 else many}"
        x -= canvas.text(x, 62, words, 30, color if count else drawing.FAINT, "rs") + 32
    seeds = [row["seed"] for row in summary["drives"]]
    facts = [
        f"seeds {min(seeds)} to {max(seeds)}" if seeds else "",
        "spoken commands" if options["spoken"] else "typed commands",
        options["precision"],
        f"device {options['device']}",
        f"adapter {options['lora']}" if options["lora"] else "",
        f"engine {options['engine'][:12]}",
        f"{summary['mean_speed']:.2f} m/s on the way",
    ]
    canvas.text(GAP + 6, 112, "   ".join(fact for fact in facts if fact), 24, drawing.FAINT)


def _share(group: Mapping[str, Any]) -> Share:
    return Share(group["successes"]["count"], group["successes"]["of"])
