# SPDX-License-Identifier: Apache-2.0
"""Summaries, tables and pictures of invented results."""

from __future__ import annotations

import sys

import cv2
import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from edgellm_arena.evaluation import picture as arena_picture
from edgellm_arena.evaluation import summary as arena_summary
from edgellm_ros.evaluation import bags_picture, bags_summary, drawing
from edgellm_ros.evaluation.shares import Share
from fixtures.made_results import arena_results, bag, bags_results, episode


def has(picture: np.ndarray, color: str) -> int:
    """Count the pixels of a colour (#RRGGBB) in a picture that OpenCV has read."""
    blue_first = np.frombuffer(bytes.fromhex(color[1:]), np.uint8)[::-1]
    return int((picture == blue_first).all(axis=2).sum())


@pytest.fixture
def axes():
    """The empty area of a chart."""
    return Figure().subplots()


@pytest.fixture
def draw(tmp_path):
    """`draw(module, results, summary)`: the pixels of the picture."""

    def run(module, results, summary) -> np.ndarray:
        module.draw(tmp_path / "picture.png", results, summary)
        return cv2.imread(str(tmp_path / "picture.png"))

    return run


def test_episodes_are_counted_by_outcome_and_by_group():
    results, items = arena_results(
        [
            episode(0, distance=1.5, obstacles=0, in_the_way=0, time=4.0),
            episode(1, distance=1.99, obstacles=1, in_the_way=2, time=6.0),
            episode(2, "collision", distance=2.0, obstacles=1, in_the_way=1, least_clearance=-0.01),
            episode(3, "timeout", distance=3.5, obstacles=2, in_the_way=0, understood=False, time=40.0),
        ]
    )
    summary = arena_summary.summarise(results, items)
    counts = {
        name: {
            label: (group["successes"]["count"], group["successes"]["of"]) for label, group in groups.items()
        }
        for name, groups in summary.items()
        if name.startswith("by_")
    }
    assert counts == {
        "by_distance": {"1.5 to 2.0": (2, 2), "2.0 to 2.5": (0, 1), "3.0 to 3.5": (0, 1)},
        "by_obstacles": {"0": (1, 1), "1": (1, 2), "2": (0, 1)},
        "by_way": {"blocked": (1, 2), "clear": (1, 2)},
    }
    assert (summary["collisions"], summary["timeouts"], summary["understood"]["count"]) == (1, 1, 3)
    assert summary["time_to_target_s"] == {"median": 4.0, "p90": 6.0, "p99": 6.0, "max": 6.0}
    assert summary["least_clearance"] == -0.01
    assert [row["seed"] for row in summary["not_reached"]] == [2, 3]


def test_only_the_requested_episodes_are_counted():
    results, items = arena_results([episode(seed) for seed in range(5)])
    assert arena_summary.summarise(results, items[:3])["episodes"] == 3


def test_unfinished_episodes_are_listed_with_their_reasons():
    results, items = arena_results([episode(0)])
    results.failed["1"] = "no memory"
    assert arena_summary.summarise(results, [*items, "1", "2"])["unfinished"] == {"1": "no memory", "2": None}


def test_the_table_has_shares_with_intervals_and_latencies():
    results, items = arena_results(
        [episode(seed, "timeout" if seed == 7 else "success") for seed in range(10)]
    )
    text = arena_summary.table(arena_summary.summarise(results, items))
    assert "at the target   9 of 10 (90.0%, 59.6 to 98.2%)" in text
    assert "first words" in text
    assert "seeds not at the target: 7" in text


def test_the_picture_of_episodes_has_their_colours(draw):
    results, items = arena_results(
        [episode(seed, "collision" if seed < 3 else "success") for seed in range(40)]
    )
    picture = draw(arena_picture, results, arena_summary.summarise(results, items))
    for color in (drawing.GREEN, drawing.BLUE, drawing.SKY, drawing.RED):
        assert has(picture, color) > 100


def test_only_a_picture_with_failures_is_red(draw):
    results, items = arena_results([episode(seed) for seed in range(40)])
    assert has(draw(arena_picture, results, arena_summary.summarise(results, items)), drawing.RED) == 0


def test_a_share_is_drawn_at_its_height(axes):
    drawing.draw_shares(axes, [("a", Share(10, 20))], "")
    dot, _, (line,) = axes.containers[0]
    assert dot.get_ydata() == [50]
    # Wilson's interval of 10 of 20
    assert line.get_segments()[0][:, 1] == pytest.approx([29.93, 70.07], abs=0.01)
    assert axes.get_ylim() == (20, 100)


def test_a_histogram_has_all_values(axes):
    drawing.draw_histogram(axes, [("a", drawing.BLUE, [1.0, 1.0, 1.0, 5.0])], "", "s", "")
    assert sorted(bar.get_height() for bar in axes.patches)[-3:] == [0, 1, 3]


def test_values_beyond_the_axis_are_in_the_last_bar_and_counted(axes):
    values = [1.0] * 990 + [50.0] * 10
    drawing.draw_histogram(axes, [("a", drawing.BLUE, values)], "latency", "s", "plans")
    assert axes.patches[-1].get_height() == 10
    assert axes.get_xlabel() == f"latency (s); 10 beyond {axes.get_xlim()[1]:g} in the last bar"
    assert axes.get_xlim()[1] < 50


def test_histograms_of_one_panel_have_one_axis(axes):
    series = [("a", drawing.SKY, [1.0]), ("b", drawing.BLUE, [10.0])]
    drawing.draw_histogram(axes, series, "", "s", "")
    one, other = ([bar.get_x() for bar in bars] for bars in axes.containers)
    assert one == other


@pytest.mark.parametrize("outcomes", [[], [episode(0, "timeout")]])
def test_without_successes_or_episodes_there_is_a_picture_and_a_table(draw, outcomes):
    results, items = arena_results(outcomes)
    summary = arena_summary.summarise(results, items)
    assert draw(arena_picture, results, summary).shape[1] == 1800
    assert f"0 of {len(items)}" in arena_summary.table(summary)


def test_bags_are_counted_and_differences_are_shown():
    results, items = bags_results([bag("a"), bag("b", differing=2)])
    results.failed["c@00ff"] = "the node ended"
    summary = bags_summary.summarise(results, [*items, "c@00ff"])
    assert (summary["equal"], summary["different"], summary["messages"]) == (1, 1, 24)
    assert summary["unfinished"] == {"c@00ff": "the node ended"}
    lines = bags_summary.table(summary).splitlines()
    assert lines[1].split() == ["a", "equal", "12", "0"]
    assert lines[2].split() == ["b", "different", "12", "2", "~/generation", "12.800", "s,", "text"]
    assert lines[3].split() == ["c", "failed"]
    assert "1 of 3 bags give the expected outputs" in lines


def test_the_picture_of_bags_shows_the_share_that_differs(draw):
    results, items = bags_results([bag("a"), bag("b", differing=6)])
    picture = draw(bags_picture, results, bags_summary.summarise(results, items))
    green, red = has(picture, drawing.GREEN), has(picture, drawing.RED)
    assert red / green == pytest.approx(0.5 / 1.5, rel=0.05)


def test_a_bag_whose_name_is_not_utf8_is_in_the_table_and_in_the_picture(draw):
    results, items = bags_results([bag("f\udcfcr")])
    summary = bags_summary.summarise(results, items)
    assert r"f\udcfcr " in bags_summary.table(summary)
    assert has(draw(bags_picture, results, summary), drawing.GREEN) > 100


def test_a_dollar_sign_in_the_name_of_a_bag_begins_no_formula(draw):
    results, items = bags_results([bag(r"$\nonsense$")])
    assert has(draw(bags_picture, results, bags_summary.summarise(results, items)), drawing.GREEN) > 100


def test_a_picture_of_many_bags_ends(draw):
    results, items = bags_results([bag(f"drive_{number:03d}") for number in range(200)])
    assert draw(bags_picture, results, bags_summary.summarise(results, items)).shape[0] < 3200


def test_a_picture_leaves_the_settings_of_matplotlib_as_they_are(draw):
    # Someone who asks for the backend has it chosen and loaded.
    names = set(matplotlib.rcParams) - {"backend"}
    before = {name: matplotlib.rcParams[name] for name in names}
    results, items = bags_results([bag("a")])
    draw(bags_picture, results, bags_summary.summarise(results, items))
    assert {name: matplotlib.rcParams[name] for name in names} == before
    assert "matplotlib.pyplot" not in sys.modules
