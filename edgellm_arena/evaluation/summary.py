# SPDX-License-Identifier: Apache-2.0
"""Summarises played episodes: how many reach their target, and how fast.

Successes are counted by distance and by obstacles.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edgellm_arena.episodes.episode import FARTHEST, NEAREST
from edgellm_ros.evaluation.results_file import Results
from edgellm_ros.evaluation.shares import Share, spread_of

BIN = 0.5  # m of the distance from the start to the target's surface
SHOWN_SEEDS = 20
Row = dict[str, Any]  # the result of one episode, with its seed


def summarise(results: Results, items: Sequence[str]) -> dict[str, Any]:
    """Summarise the episodes `items` that are finished, in their order.

    All values but those under `measured` follow from the items and the options.
    """
    found = [(item, results.finished[item]) for item in items if item in results.finished]
    rows = [{"seed": int(item), **outcome["result"]} for item, outcome in found]
    reached = [row for row in rows if row["outcome"] == "success"]
    clearances = [row["least_clearance"] for row in rows if row["least_clearance"] is not None]
    return {
        "evaluation": results.kind,
        "options": results.options,
        "episodes": len(rows),
        "successes": _successes(rows).to_json(),
        "collisions": sum(row["outcome"] == "collision" for row in rows),
        "timeouts": sum(row["outcome"] == "timeout" for row in rows),
        "understood": Share(sum(row["understood"] for row in rows), len(rows)).to_json(),
        "time_to_target_s": spread_of(row["time"] for row in reached),
        "mean_speed": statistics.fmean([row["mean_speed"] for row in rows if row["mean_speed"]] or [0.0]),
        "least_clearance": min(clearances, default=None),
        "plans": sum(row["plans"] for row in rows),
        "clipped_actions": sum(row["clipped_actions"] for row in rows),
        "by_distance": _groups(rows, lambda row: _bin(row["distance"])),
        "by_obstacles": _groups(rows, lambda row: str(row["obstacles"])),
        "by_way": _groups(rows, lambda row: "blocked" if row["in_the_way"] else "clear"),
        "not_reached": [
            {name: row[name] for name in ("seed", "outcome", "time", "end_distance", "command")}
            for row in rows
            if row["outcome"] != "success"
        ],
        "unfinished": {item: results.failed.get(item) for item in items if item not in results.finished},
        "drives": rows,
        "measured": _measured([outcome["measured"] for _, outcome in found]),
    }


def table(summary: Mapping[str, Any]) -> str:
    """Return the summary as text for people."""
    times, clearance = summary["time_to_target_s"], summary["least_clearance"]
    lines = [
        f"at the target   {_share(summary['successes'])}",
        f"collisions      {summary['collisions']}",
        f"timeouts        {summary['timeouts']}",
        f"understood      {_share(summary['understood'])}",
    ]
    if times:
        lines.append(
            f"time to target  median {times['median']:.1f} s, 90% within {times['p90']:.1f} s (simulated)"
        )
    lines.append(
        f"driving         {summary['mean_speed']:.2f} m/s on the way"
        + ("" if clearance is None else f", at least {clearance:.2f} m from obstacles")
    )
    for name, heading in GROUPS.items():
        lines += ["", f"{heading:<32}{'at the target':<32}95% interval"]
        lines += [_line(label, group) for label, group in summary[name].items()]
    lines += ["", *_latencies(summary["measured"])]
    seeds = [str(row["seed"]) for row in summary["not_reached"]]
    if seeds:
        more = f" and {len(seeds) - SHOWN_SEEDS} more" if len(seeds) > SHOWN_SEEDS else ""
        lines.append(f"seeds not at the target: {', '.join(seeds[:SHOWN_SEEDS])}{more}")
    return "\n".join(lines)


GROUPS = {
    "by_distance": "metres from start to target",
    "by_obstacles": "grey obstacles in the room",
    "by_way": "straight way to the target",
}


def _successes(rows: Sequence[Row]) -> Share:
    return Share(sum(row["outcome"] == "success" for row in rows), len(rows))


def _bin(distance: float) -> str:
    last = round((FARTHEST - NEAREST) / BIN) - 1
    low = NEAREST + BIN * min(max(int((distance - NEAREST) / BIN), 0), last)
    return f"{low:.1f} to {low + BIN:.1f}"


def _groups(rows: Sequence[Row], label: Callable[[Row], str]) -> dict[str, Any]:
    """Return successes, collisions and timeouts of the groups, sorted by label."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(label(row), []).append(row)
    return {
        name: {
            "successes": _successes(groups[name]).to_json(),
            "collisions": sum(row["outcome"] == "collision" for row in groups[name]),
            "timeouts": sum(row["outcome"] == "timeout" for row in groups[name]),
        }
        for name in sorted(groups)
    }


def _measured(measured: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Summarise times by the clocks of the computers."""
    return {
        "plan_s": spread_of(second for each in measured for second in each["plan_s"]),
        "first_words_s": spread_of(second for each in measured for second in each["first_words_s"]),
        "workers": sorted({each["workers"] for each in measured}),
    }


def _share(share: Mapping[str, Any]) -> str:
    return str(Share(share["count"], share["of"]))


def _line(label: str, group: Mapping[str, Any]) -> str:
    share = group["successes"]
    count = f"{share['count']} of {share['of']}"
    return f"  {label:<30}{count:<14}{share['share']:>6.1%}{'':<12}{share['low']:.1%} to {share['high']:.1%}"


def _latencies(measured: Mapping[str, Any]) -> list[str]:
    """Return the lines about latencies; none without plans."""
    if measured["plan_s"] is None:
        return []
    beside = " or ".join(map(str, measured["workers"]))
    lines = [f"{'measured (workers at a time: ' + beside + ')':<44}{'median':>10}{'90%':>10}{'99%':>10}"]
    for name, label in (("first_words_s", "first words"), ("plan_s", "plan")):
        spread = measured[name]
        values = "".join(f"{spread[key] * 1e3:>7.0f} ms" for key in ("median", "p90", "p99"))
        lines.append(f"  {label:<42}{values}")
    return [*lines, ""]
