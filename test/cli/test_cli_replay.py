# SPDX-License-Identifier: Apache-2.0
"""`edgellm replay` refuses unusable input: exit code 2, one line, no output bag."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fixtures.made_bags import ARENA, copy_bag

pytest.importorskip("rclpy")
pytest.importorskip("edgellm_ros.msg")


@pytest.fixture
def assert_refused(edgellm, arena_engine, tmp_path):
    """Replays and looks for words in the one line of the error."""

    def check(words: str, bag: Path, *arguments: object) -> None:
        engine = () if "--engine" in arguments else ("--engine", arena_engine)
        run = edgellm("replay", bag, "--out", tmp_path / "new" / "out", *engine, *arguments)
        assert run.code == 2
        assert run.out == ""
        assert len(run.err.splitlines()) == 1, run.err
        assert words in run.err
        assert not (tmp_path / "new").exists()

    return check


def test_a_bag_that_is_not_there(assert_refused, tmp_path):
    assert_refused("nothing: no such bag", tmp_path / "nothing")


@pytest.mark.parametrize("storage, suffix", [("MCAP", "mcap"), ("SQLITE3", "db3")])
def test_a_bag_that_was_cut_short(assert_refused, tmp_path, storage, suffix):
    path = copy_bag(tmp_path / "bag", storage=storage) / f"bag.{suffix}"
    path.write_bytes(path.read_bytes()[:-30_000])
    assert_refused("not a readable bag", tmp_path / "bag")


def test_a_truncated_chunk(assert_refused, tmp_path):
    bag = Path(shutil.copytree(ARENA, tmp_path / "bag"))
    data = (bag / "arena.mcap").read_bytes()
    (bag / "arena.mcap").write_bytes(data[:200_000] + data[201_000:])
    assert_refused("bag: not a readable bag", bag)


@pytest.mark.parametrize("storage", ["MCAP", "SQLITE3"])
def test_a_bag_without_messages(assert_refused, tmp_path, storage):
    bag = copy_bag(tmp_path / "bag", keep=lambda message: False, storage=storage)
    assert_refused("the bag is empty", bag)


@pytest.mark.parametrize("name", ["image", "odom"])
def test_a_topic_that_the_node_needs_is_missing(assert_refused, tmp_path, name):
    bag = copy_bag(tmp_path / "bag", keep=lambda m: m.topic.name != f"/edgellm/{name}")
    assert_refused(f"no messages for ~/{name} (/edgellm/{name})", bag)


def test_missing_odometry_can_be_left_out_as_the_error_says(assert_refused, tmp_path):
    bag = copy_bag(tmp_path / "bag", keep=lambda m: m.topic.name != "/edgellm/odom")
    assert_refused(
        "name the topic with --remap, or play without odometry with --no-odometry; the bag has", bag
    )


def test_a_topic_of_a_type_that_the_node_does_not_take(assert_refused, tmp_path):
    names = {"/edgellm/command": "/edgellm/odom", "/edgellm/odom": "/edgellm/command"}
    bag = copy_bag(tmp_path / "bag", rename=names)
    assert_refused("has type std_msgs/msg/String, expected nav_msgs/msg/Odometry for ~/odom", bag)


def test_an_expected_bag_that_is_none(assert_refused):
    assert_refused("not an output bag", ARENA, "--expect", ARENA)


def test_a_place_that_is_taken(edgellm, arena_engine, tmp_path):
    run = edgellm("replay", ARENA, "--out", tmp_path, "--engine", arena_engine)
    assert run.code == 2
    assert run.err.endswith(": exists already; name a new bag, or remove it\n")


def test_an_engine_that_is_not_there(assert_refused, tmp_path):
    assert_refused("not an engine directory", ARENA, "--engine", tmp_path / "e")


@pytest.mark.parametrize(
    "command, option",
    [
        (("replay", ARENA), "--engine"),
        (("demo",), "--checkpoint"),
        (("evaluate", "arena"), "--engine"),
    ],
)
def test_outside_of_a_clone_the_error_asks_for_an_engine(edgellm, tmp_path, monkeypatch, command, option):
    from edgellm_ros.builder import export_cache

    monkeypatch.setattr(export_cache, "ARENA_CHECKPOINT", tmp_path / "site-packages" / "models" / "arena")
    monkeypatch.chdir(tmp_path)
    run = edgellm(*command, "--out", tmp_path / "out")
    assert run.code == 2
    assert len(run.err.splitlines()) == 1, run.err
    assert f"with {option}: " in run.err
    assert "site-packages" not in run.err


@pytest.mark.parametrize(
    "content, words",
    [
        (None, "params.yaml: No such file"),
        ("a: [", "params.yaml: not a YAML file"),
        ("plan_on: image", "params.yaml: not a file of ROS parameters"),
        ("", "params.yaml: not a file of ROS parameters"),
        (
            "arena: {ros__parameters: {seed: 1}}",
            "params.yaml: parameters of arena, expected some of edgellm or /edgellm or /**",
        ),
    ],
)
def test_a_parameters_file_that_is_none(assert_refused, tmp_path, content, words):
    params = tmp_path / "params.yaml"
    if content is not None:
        params.write_text(content)
    assert_refused(words, ARENA, "--params", params)


@pytest.mark.parametrize(
    "option, value",
    [
        ("--remap", "/a=b"),
        ("--tolerance", "-1"),
        ("--tolerance", "nan"),
        ("--noise-seed", "-1"),
        ("--storage", "zip"),
        ("--device", "abacus"),
    ],
)
def test_an_option_that_makes_no_sense(assert_refused, option, value):
    assert_refused(value, ARENA, option, value)
