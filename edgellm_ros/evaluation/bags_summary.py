# SPDX-License-Identifier: Apache-2.0
"""Summarises replayed bags: which gave expected outputs, how others first differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgellm_ros.echo import escaped
from edgellm_ros.evaluation.results_file import Results
from edgellm_ros.evaluation.shares import spread_of

NAME_WIDTH = 40
FAILED = "failed"


def summarise(results: Results, items: Sequence[str]) -> dict[str, Any]:
    """Summarise the bags `items` that are finished, in their order.

    All values but those under `measured` follow from the bags and the options.
    """
    outcomes = [results.finished[item] for item in items if item in results.finished]
    bags = [outcome["result"] for outcome in outcomes]
    seconds = [outcome["measured"]["seconds"] for outcome in outcomes]
    return {
        "evaluation": results.kind,
        "options": results.options,
        "bags": len(bags),
        "equal": sum(bag["equal"] for bag in bags),
        "different": sum(not bag["equal"] for bag in bags),
        "messages": sum(bag["messages"] for bag in bags),
        "differing_messages": sum(bag["differing"] for bag in bags),
        "deviation": max((bag["deviation"] for bag in bags), default=0.0),
        "unfinished": {item: results.failed.get(item) for item in items if item not in results.finished},
        "comparisons": bags,
        "measured": {"replay_s": spread_of(seconds)},
    }


def table(summary: Mapping[str, Any]) -> str:
    """Return the summary as text for people."""
    lines = [f"{'bag':<{NAME_WIDTH}}{'':<12}{'messages':>9}{'differing':>11}   first difference"]
    for bag in summary["comparisons"]:
        word = "equal" if bag["equal"] else "different"
        row = f"{_name(bag['name']):<{NAME_WIDTH}}{word:<12}{bag['messages']:>9}{bag['differing']:>11}"
        if bag["first"] is not None:
            first = bag["first"]
            row += f"   {first['topic']} {first['stamp'] / 1e9:.3f} s, {first['field']}"
        lines.append(row)
    for item in summary["unfinished"]:
        lines.append(f"{_name(bag_name(item)):<{NAME_WIDTH}}{FAILED}")
    total = summary["bags"] + len(summary["unfinished"])
    lines += ["", f"{summary['equal']} of {total} bags give the expected outputs"]
    files = sorted({file for bag in summary["comparisons"] for file in bag["engine_files"]})
    if files:
        lines.append(f"the engine differs from that of the expected outputs: {', '.join(files)}")
    return "\n".join(lines)


def bag_name(item: str) -> str:
    """Return the name of a bag from NAME@HASH."""
    return item.rpartition("@")[0]


def _name(name: str) -> str:
    name = escaped(name)
    return name if len(name) < NAME_WIDTH else name[: NAME_WIDTH - 4] + "..."
