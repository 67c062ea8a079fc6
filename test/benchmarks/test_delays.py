# SPDX-License-Identifier: Apache-2.0
"""What the benchmark of delays makes of its options and of the arena's outcomes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.analytic_driver import play_driver
from benchmarks.delays import Case, main, result_of, table
from edgellm_arena.ros.demo import JUMPS

OUTCOME = {
    "number": 0, "seed": 90_000, "outcome": "success", "time": 5.0, "plans": 2, "plan_seconds": [0.1],
    "first_words_seconds": [0.1], "part_seconds": {"decode": [0.1]}, "clipped_actions": 0, "mean_speed": 0.5,
    "least_clearance": 0.1,
    "picture": None, "jerk_at_changes": [1.0, 3.0], "excess_jerk_at_changes": [0.5],
    "jerk_within_plans": [1.0], "yaw_acceleration_at_changes": [], "excess_yaw_acceleration_at_changes": [],
    "yaw_acceleration_within_plans": [0.0],
}  # fmt: skip
COLLISION = {**OUTCOME, "number": 1, "outcome": "collision", "time": 9.0, "jerk_at_changes": [5.0]}


@pytest.mark.parametrize(
    "mode, execution, chunking",
    [("wait", "wait", "off"), ("naive", "async", "off"), ("trained", "async", "trained")],
)
def test_a_mode_is_an_execution_and_a_form_of_chunking(mode, execution, chunking):
    options = Case(mode, 0, 0.8).options(Path("engine"), 90)
    assert (options.execution, options.chunking, options.inference_delay) == (execution, chunking, 0.8)


def test_jumps_are_pooled_over_episodes_and_times_are_those_of_successes():
    result = result_of(Case("guided", 24, 0.4), [OUTCOME, COLLISION])
    assert result["mode"] == "guided:24"
    assert result["jerk_at_changes"]["mean"] == pytest.approx(3.0)
    assert result["changes"] == 3
    assert (result["successes"], result["collisions"], result["failed"]) == (1, 1, [1])
    assert result["time_to_target"] == 5.0
    assert result["yaw_acceleration_at_changes"] == {"mean": None, "p95": None}


def test_the_table_has_a_row_for_each_case():
    lines = table([result_of(Case("naive", 0, 0.8), [OUTCOME])]).splitlines()
    assert len(lines) == 3
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2].startswith("| 0.8 s | naive | 1 of 1 | 0 | 5.0 s | 2 | 2.00 (2.90) | 0.50 (0.50) |")


def test_the_driver_continues_its_own_plans():
    first = play_driver(90, 0)
    assert first["outcome"] == "success"
    assert len(first["excess_jerk_at_changes"]) > 1
    assert max(first["excess_jerk_at_changes"]) < 1e-9
    assert max(first["jerk_at_changes"]) > 0.01
    second = play_driver(90, 0)
    assert [second[name] for name in JUMPS] == [first[name] for name in JUMPS]


@pytest.mark.slow
def test_the_driver_is_a_case_once_and_needs_no_node(capsys):
    result = main(["--modes", "driver", "--delays", "0,0.8", "--episodes", "2"])
    (row,) = result["results"]
    assert (row["mode"], row["delay"], row["successes"]) == ("driver", 0.0, 2)
    assert "| 0 s | driver | 2 of 2 | 0 |" in capsys.readouterr().err


@pytest.mark.parametrize("modes", ["fast", "guided:wide", "driver:3"])
def test_an_unknown_mode_is_refused(modes, capsys):
    with pytest.raises(SystemExit):
        main(["--modes", modes])
    assert f"got '{modes}'" in capsys.readouterr().err
