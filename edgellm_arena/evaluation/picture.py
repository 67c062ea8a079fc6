# SPDX-License-Identifier: Apache-2.0
"""Draws the summary of played episodes as one picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm_ros.evaluation import drawing
from edgellm_ros.evaluation.drawing import draw_histogram, draw_shares
from edgellm_ros.evaluation.results_file import Results
from edgellm_ros.evaluation.shares import Share

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEIGHT = 8.8  # inches
OBSTACLES = {"0": "no obstacle", "1": "1 obstacle"}
WAYS = {"clear": "way clear", "blocked": "way blocked"}


def draw(path: Path, results: Results, summary: Mapping[str, Any]) -> None:
    """Write the picture as PNG.

    The picture shows successes by distance and by obstacles, latencies, and times to the target.
    ImportError without Matplotlib.
    """
    by_distance = [(name, _share(group)) for name, group in summary["by_distance"].items()]
    obstacles = [
        (OBSTACLES.get(name, f"{name} obstacles"), _share(group))
        for name, group in summary["by_obstacles"].items()
    ]
    ways = [(WAYS[name], _share(summary["by_way"][name])) for name in WAYS if name in summary["by_way"]]
    measured = [results.finished[str(row["seed"])]["measured"] for row in summary["drives"]]
    plans = [1e3 * second for each in measured for second in each["plan_s"]]
    words = [1e3 * second for each in measured for second in each["first_words_s"]]
    beside = " or ".join(map(str, summary["measured"]["workers"]))
    times = [row["time"] for row in summary["drives"] if row["outcome"] == "success"]
    with drawing.picture(path, HEIGHT, _title(summary), _facts(summary)) as figure:
        _failures(figure, summary)
        (distance, obstacle), (latency, time) = figure.subplots(2, 2)
        _name(distance, "At the target, by distance", "with 95% intervals")
        draw_shares(distance, by_distance, "distance from start to target (m)")
        _name(obstacle, "At the target, by obstacles", "with 95% intervals")
        label = "grey obstacles in the room; any solid on the straight way"
        draw_shares(obstacle, [*obstacles, *ways], label, len(obstacles))
        _name(latency, "Latency", f"{len(plans)} plans, workers at a time: {beside}", legend=True)
        series = [("first words", drawing.SKY, words), ("whole plan", drawing.BLUE, plans)]
        draw_histogram(latency, series, "latency", "ms", "plans")
        _name(time, "Time to the target", f"{len(times)} episodes", legend=True)
        draw_histogram(time, [("reached", drawing.GREEN, times)], "simulated time", "s", "episodes")


def _name(axes: Axes, title: str, note: str, legend: bool = False) -> None:
    """Write title and note of a panel, above a legend if it has one."""
    pad = 28 if legend else 12
    axes.set_title(title, pad=pad)
    axes.set_title(note, loc="right", pad=pad, size=drawing.SMALL, color=drawing.FAINT)


def _title(summary: Mapping[str, Any]) -> str:
    successes = summary["successes"]
    title = f"{successes['count']} of {successes['of']} episodes at the target"
    if not successes["of"]:
        return title
    share, low, high = (100 * successes[name] for name in ("share", "low", "high"))
    return f"{title} ({share:.1f}%, {low:.1f} to {high:.1f}%)"


def _facts(summary: Mapping[str, Any]) -> str:
    options = summary["options"]
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
    return "   ".join(fact for fact in facts if fact)


def _failures(figure: Figure, summary: Mapping[str, Any]) -> None:
    """Write the numbers of collisions and timeouts into the header, on the right."""
    counts = {name: summary[f"{name}s"] for name in ("collision", "timeout")}
    words = [f"{count} {name if count == 1 else f'{name}s'}" for name, count in counts.items()]
    color = drawing.RED if any(counts.values()) else drawing.FAINT
    x, y = 1 - drawing.MARGIN / drawing.WIDTH, 1 - 0.5 / HEIGHT
    figure.text(x, y, ", ".join(words), color=color, size=drawing.LARGE, ha="right")


def _share(group: Mapping[str, Any]) -> Share:
    return Share(group["successes"]["count"], group["successes"]["of"])
