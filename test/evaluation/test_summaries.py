# SPDX-License-Identifier: Apache-2.0
"""Summaries, tables and pictures of invented results."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from edgellm_ros.evaluation import arena_picture, arena_summary, bags_picture, bags_summary, drawing
from fixtures.made_results import arena_results, bag, bags_results, episode


def has(picture: np.ndarray, color: tuple[int, int, int]) -> int:
    """Count the pixels of a colour (RGB) in a picture that OpenCV has read."""
    return int((picture == np.array(color[::-1])).all(axis=2).sum())


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
    for color in (drawing.GREEN, drawing.BLUE, drawing.TEAL, drawing.RED):
        assert has(picture, color) > 100
    assert has(picture, drawing.AMBER) == 0  # no timeouts


def test_a_share_is_drawn_at_its_height():
    canvas = drawing.Canvas(400, 500)
    panel = drawing.Panel(canvas, drawing.Frame(0, 0, 400, 500), "")
    drawing.draw_shares(panel, [("a", drawing.Share(10, 20))], "")
    pixels = np.array(canvas.image)[:, (panel.left + panel.right) // 2]
    green = np.flatnonzero((pixels == drawing.GREEN).all(axis=1))
    # Wilson's interval of 10 of 20 is 0.2993 to 0.7007; the axis begins at 20%.
    rows = [panel.bottom - (panel.bottom - panel.top) * (share - 0.2) / 0.8 for share in (0.7007, 0.2993)]
    assert (green.min(), green.max()) == pytest.approx(rows, abs=4)


def test_a_histogram_has_all_values(draw):
    canvas = drawing.Canvas(900, 500)
    panel = drawing.Panel(canvas, drawing.Frame(0, 0, 900, 500), "")
    drawing.draw_histogram(panel, [("a", drawing.BLUE, [1.0, 1.0, 1.0, 5.0])], "seconds", "s", bins=10)
    pixels = (np.array(canvas.image)[panel.top : panel.bottom - 2] == drawing.BLUE).all(axis=2)
    heights = sorted({int(count) for count in pixels.sum(axis=0)} - {0})
    assert heights[-1] == pytest.approx(3 * heights[0], rel=0.05)


def test_histograms_of_one_panel_have_one_axis():
    canvas = drawing.Canvas(900, 500)
    panel = drawing.Panel(canvas, drawing.Frame(0, 0, 900, 500), "")
    series = [("a", drawing.TEAL, [1.0]), ("b", drawing.BLUE, [10.0])]
    drawing.draw_histogram(panel, series, "seconds", "s", bins=20)
    area = np.array(canvas.image)[panel.top : panel.bottom - 2]
    columns = [np.flatnonzero((area == color).all(axis=2).any(axis=0)) for _, color, _ in series]
    teal, blue = ((found.mean() - panel.left) / (panel.right - panel.left) for found in columns)
    assert 0.05 < teal < 0.15
    assert blue > 0.7


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


def test_a_picture_of_many_bags_ends(draw):
    results, items = bags_results([bag(f"drive_{number:03d}") for number in range(200)])
    assert draw(bags_picture, results, bags_summary.summarise(results, items)).shape[0] < 3200


@pytest.mark.parametrize(("span", "most", "step"), [(1.0, 5, 0.2), (375, 8, 50), (15, 4, 5), (80, 6, 20)])
def test_steps_of_an_axis_are_round(span, most, step):
    assert drawing.tick_step(span, most) == pytest.approx(step)
