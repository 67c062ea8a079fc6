# SPDX-License-Identifier: Apache-2.0
"""Draws the summary of played episodes as one picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgellm_ros.evaluation import drawing
from edgellm_ros.evaluation.drawing import draw_histogram, draw_shares
from edgellm_ros.evaluation.results_file import Results
from edgellm_ros.evaluation.shares import Share

HEIGHT = 5.2  # inches


def draw(path: Path, results: Results, summary: Mapping[str, Any]) -> None:
    """Write the picture as PNG: successes by mark, times to place, latencies.

    ImportError without Matplotlib.
    """
    options, successes = summary["options"], summary["successes"]
    title = f"{successes['count']} of {successes['of']} blocks placed"
    facts = f"driver {options['driver']}   delay {options['delay']:g} s   blend {options['blend']:g} s   "
    if options["follow_time"]:
        facts += f"followed for {options['follow_time']:g} s   "
    facts += f"{summary['violations']} commands beyond a limit   {sum(summary['refused'].values())} of "
    facts += f"{summary['plans']} chunks refused"
    goals = {"all": successes, **summary["by_goal"]}
    shares = [(name, Share(each["count"], each["of"])) for name, each in goals.items()]
    times = [row["time"] for row in summary["drives"] if row["outcome"] == "placed"]
    measured = [results.finished[str(row["seed"])]["measured"] for row in summary["drives"]]
    plans = [1e3 * seconds for each in measured for seconds in each["plan_seconds"] if seconds]
    with drawing.picture(path, HEIGHT, title, facts) as figure:
        share, time, *latency = figure.subplots(1, 3 if plans else 2)
        share.set_title("Placed, by mark", pad=28)
        draw_shares(share, shares, "95% intervals", 1)
        time.set_title("Time to place", pad=28)
        draw_histogram(time, [("placed", drawing.GREEN, times)], "simulated time", "s", "episodes")
        for axes in latency:
            axes.set_title("Frame to chunk", pad=28)
            draw_histogram(axes, [("chunk", drawing.BLUE, plans)], "latency", "ms", "chunks")
