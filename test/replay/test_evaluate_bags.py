# SPDX-License-Identifier: Apache-2.0
"""`edgellm evaluate bags` with the real node: expected outputs, and other outputs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import cv2
import pytest

from fixtures.command_run import Run
from fixtures.made_bags import copy_bag

pytest.importorskip("rclpy")
pytest.importorskip("edgellm_ros.msg")
pytestmark = [pytest.mark.real_time, pytest.mark.timeout(600)]

SHORT = (13.6e9, 15.4e9)  # the part of the shipped bag in which the robot starts to drive
TIMEOUT_S = 240


def edgellm(*arguments: object) -> Run:
    command = [sys.executable, "-m", "edgellm_ros", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    return Run(done.returncode, done.stdout, done.stderr)


def is_in(message) -> bool:
    return SHORT[0] < message.time < SHORT[1] and message.topic.name != "/edgellm/audio"


@pytest.fixture
def folders(arena_engine, tmp_path) -> tuple[Path, Path]:
    """Two folders: two bags, and the first one's expected outputs under both names."""
    bags, expected = tmp_path / "bags", tmp_path / "expected"
    bags.mkdir()
    copy_bag(bags / "same", keep=is_in)
    copy_bag(bags / "other", keep=lambda m: is_in(m) and (m.topic.name, m.time) != last_frame(bags / "same"))
    run = edgellm("replay", bags / "same", "--out", expected / "same", "--engine", arena_engine)
    assert run.code == 0, run.err
    shutil.copytree(expected / "same", expected / "other")
    return bags, expected


def last_frame(bag: Path) -> tuple[str, int]:
    from edgellm_ros.replay.bag import Bag

    with Bag(bag) as opened:
        *_, last = opened.messages(["/edgellm/image"])
    return last.topic.name, last.time


def test_a_bag_with_other_outputs_is_reported_and_equal_bags_are_not_replayed_again(
    folders, arena_engine, tmp_path
):
    bags, expected = folders
    out = tmp_path / "out"
    (out / "outputs" / ".other.abcd1234").mkdir(parents=True)  # of a replay that was killed
    (out / "outputs" / ".other.swp").touch()  # of an editor
    arguments = ("evaluate", "bags", bags, "--expect", expected, "--engine", arena_engine, "--out", out)
    run = edgellm(*arguments, "--processes", 2, "--json")
    assert run.code == 1, run.err
    assert (run.json["equal"], run.json["different"], run.json["unfinished"]) == (1, 1, {})
    other, same = run.json["comparisons"]
    assert (same["name"], same["equal"], same["differing"]) == ("same", True, 0)
    assert (other["name"], other["equal"]) == ("other", False)
    assert other["differing"] > 0
    assert sorted(path.name for path in (out / "outputs").iterdir()) == [".other.swp", "other", "same"]
    assert cv2.imread(str(out / "summary.png")).shape[1] == 1800

    shutil.rmtree(bags / "other")
    again = edgellm(*arguments)
    assert again.code == 0, again.err
    assert "starting" not in again.err
    assert "1 of 1 bags give the expected outputs" in again.out
