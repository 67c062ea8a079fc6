# SPDX-License-Identifier: Apache-2.0
"""What is kept of an episode, and the summary of many."""

from __future__ import annotations

import hashlib
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edgellm_ros.evaluation.shares import Share, spread_of
from edgellm_tabletop.episodes.drivers import contract
from edgellm_tabletop.episodes.limits import check_limits
from edgellm_tabletop.episodes.robot import Robot
from edgellm_tabletop.world import GOALS, STEP_S

LIMITS = ("position", "speed", "acceleration", "jerk")
Row = Mapping[str, Any]  # the description of one episode


def describe(robot: Robot, seed: int, outcome: str) -> dict[str, Any]:
    """Describe an episode that was just played, as JSON types.

    All values but `plan_seconds` and `node_seconds` follow from the seed and the driver.
    """
    record, world = robot.record, robot.world
    plans = [plan for _, plan in record.plans]
    return {
        "seed": seed,
        "goal": world.goal,
        "outcome": outcome,
        "time": round(world.steps * STEP_S, 1),  # s, simulated
        "plans": len(plans),
        "refused": dict(Counter(plan.refused for plan in plans if plan.refused)),
        "from_mark": float(np.hypot(*(world.block[:2] - GOALS[world.goal]))),  # m
        **check_limits(record, contract()),
        "track_sha256": hashlib.sha256(np.array(record.positions).tobytes()).hexdigest(),
        "plan_seconds": [plan.seconds for plan in plans],
        "node_seconds": [plan.node_seconds for plan in plans],
    }


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Summarise episodes that `describe` has described."""
    placed = [row for row in rows if row["outcome"] == "placed"]
    refused: Counter[str] = Counter()
    for row in rows:
        refused.update(row["refused"])
    return {
        "episodes": len(rows),
        "successes": _share(rows),
        "by_goal": {goal: _share([row for row in rows if row["goal"] == goal]) for goal in GOALS},
        "timeouts": sum(row["outcome"] == "timeout" for row in rows),
        "lost": sum(row["outcome"] == "lost" for row in rows),
        "time_to_place_s": spread_of(row["time"] for row in placed),
        "from_mark": statistics.fmean([row["from_mark"] for row in placed] or [0.0]),
        "plans": sum(row["plans"] for row in rows),
        "refused": dict(refused),
        "violations": sum(row["violations"] for row in rows),
        **{f"largest_{name}": max((row[f"largest_{name}"] for row in rows), default=0.0) for name in LIMITS},
        "not_placed": [
            {name: row[name] for name in ("seed", "goal", "outcome", "time", "refused")}
            for row in rows
            if row["outcome"] != "placed"
        ],
    }


def times_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Summarise the times of chunks by the computer's clock.

    A time is None where no chunk was computed.
    """
    times = {
        name: spread_of(seconds for row in rows for seconds in row[f"{name}_seconds"] if seconds)
        for name in ("plan", "node")
    }
    return {f"{name}_s": spread for name, spread in times.items()}


def table(summary: Mapping[str, Any]) -> str:
    """Return the summary as text for people."""
    successes, time = summary["successes"], summary["time_to_place_s"]
    lines = [f"placed          {Share(successes['count'], successes['of'])}"]
    for goal, share in summary["by_goal"].items():
        lines.append(f"  mark {goal:<9} {Share(share['count'], share['of'])}")
    lines.append(f"timeouts        {summary['timeouts']}")
    lines.append(f"blocks lost     {summary['lost']}")
    if time:
        lines.append(
            f"time to place   median {time['median']:.1f} s, 90% within {time['p90']:.1f} s (simulated)"
        )
        lines.append(f"block to mark   {1e3 * summary['from_mark']:.0f} mm on average, at most 30 mm counts")
    reasons = ", ".join(f"{count} {reason}" for reason, count in summary["refused"].items())
    lines.append(f"chunks          {summary['plans']}; refused by edgellm_arm: {reasons or 'none'}")
    lines += ["", "limits of the contract              largest command", *limits_of(summary)]
    measured = summary["measured"]
    for name, label in (("plan_s", "frame to chunk"), ("node_s", "of which in the node")):
        spread = measured.get(name)
        if spread is not None:
            values = "".join(f"{1e3 * spread[key]:>8.1f} ms" for key in ("median", "p90", "p99"))
            lines += ["", f"{'measured':<28}{'median':>11}{'90%':>11}{'99%':>11}"] if name == "plan_s" else []
            lines.append(f"  {label:<26}{values}")
    seeds = [str(row["seed"]) for row in summary["not_placed"]]
    return "\n".join([*lines, *(["", f"seeds not placed: {', '.join(seeds[:20])}"] if seeds else [])])


def limits_of(summary: Mapping[str, Any]) -> list[str]:
    """Return the lines about limits."""
    lines = [f"  {name:<34}{100 * summary[f'largest_{name}']:.1f}% of the limit" for name in LIMITS]
    return [*lines, f"  {'commands beyond a limit':<34}{summary['violations']}"]


def _share(rows: Sequence[Row]) -> dict[str, Any]:
    return Share(sum(row["outcome"] == "placed" for row in rows), len(rows)).to_json()
